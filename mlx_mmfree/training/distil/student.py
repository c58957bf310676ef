"""The student of a run: its mixers, its first weights, and the effort that it takes."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import TrainingError
from ...evaluation.bound import chip
from ...hub.checkpoint.checkpoint import Checkpoint, open_checkpoint
from ...hub.checkpoint.load import OpenedModel
from ...layers.dense import in_floats
from ...layers.matrix import matrices
from ...models import Decoder, architecture_of
from ...models.parts.architecture import bases
from ...models.parts.mixers import MixerChoice, find_token_mixer
from ...models.parts.ternary_linears import TernaryLinears
from ...models.parts.transformer import ATTENTION, HybridConfig, TransformerConfig
from ..losses.loss import logits_at_a_time
from .settings import DistilSettings, StageName

_SAME_NAMES = ("query_proj", "key_proj", "value_proj", "output_proj")
_ROLES = {name: name for name in _SAME_NAMES} | {"input_proj": "value_proj"}
"""Projections of a mixer, and the projections of attention that they begin as."""


def base_config(teacher: Decoder, command: str = DistilSettings.command) -> TransformerConfig:
    """The description of a teacher. The command is named in messages.

    Raises:
        TrainingError: It is no transformer of the Llama family, or one that cannot be a base.
    """
    record = architecture_of(teacher.config)
    if record.why_no_base is not None:
        raise TrainingError(
            f"[{command}] 'model' must be a transformer of the Llama family ({', '.join(bases())}) but "
            f"is a {record.name}: {record.why_no_base}."
        )
    config: TransformerConfig = teacher.config
    return config


def mixers_of(
    base: TransformerConfig,
    to: Sequence[MixerChoice],
    keep_layers: Sequence[int] = (),
    command: str = DistilSettings.command,
) -> tuple[MixerChoice, ...]:
    """The mixer of each layer, with the sizes of the heads that it takes the place of.

    Args:
        base: The teacher.
        to: One mixer for all layers, or several, which repeat from layer to layer. `same` is the
            teacher's attention.
        keep_layers: Layers that keep their attention, from 0.
        command: The command in messages.

    Raises:
        TrainingError: A layer does not exist.
        UnsupportedModelError: A mixer is unknown.
    """
    layers = base.num_hidden_layers
    for layer in keep_layers:
        if not 0 <= layer < layers:
            raise TrainingError(
                f"[{command}] 'keep_layers' must hold numbers of layers from 0 to {layers - 1} but got "
                f"{layer}."
            )
    attention = MixerChoice(ATTENTION)
    sized = [
        attention if choice.name in ("same", ATTENTION) else _with_heads(base, choice)
        for choice in to
    ]
    return tuple(attention if n in keep_layers else sized[n % len(sized)] for n in range(layers))


def _with_heads(base: TransformerConfig, choice: MixerChoice) -> MixerChoice:
    """The choice with the heads of the base, where it takes heads and has no words of its own."""
    of_heads = base.num_attention_heads * base.head_dim
    sizes: dict[str, int] = {"num_heads": base.num_attention_heads}
    if of_heads != base.hidden_size:
        sizes["head_dim"] = base.head_dim
    sizes |= {
        "num_kv_heads": base.num_key_value_heads,
        "key_dims": of_heads,
        "value_dims": of_heads,
    }
    known = inspect.signature(find_token_mixer(choice.name).__init__).parameters
    taken = {name: size for name, size in sizes.items() if name in known}
    return MixerChoice(choice.name, {**taken, **choice.options})


def student_config(
    base: TransformerConfig, mixers: Sequence[MixerChoice], linears: TernaryLinears | None
) -> Any:
    """The description of the student: of the base's own kind if all layers keep their attention.

    Args:
        base: The teacher.
        mixers: The mixer of each layer.
        linears: The ternary linears of the blocks; `None` keeps the base's.
    """
    if linears is not None and base.linears is None:
        base = replace(base, linears=linears)
    if all(choice.name == ATTENTION for choice in mixers):
        return base
    return HybridConfig.of(base, tuple(mixers))


def open_first(
    checkpoint: Checkpoint, init_from: str | None, teacher: Decoder, command: str
) -> OpenedModel:
    """The model that a student begins as, with float weights or codes.

    Args:
        checkpoint: The teacher's.
        init_from: Another model to begin as; `None` is the teacher.
        teacher: The teacher.
        command: The command in messages.

    Raises:
        TrainingError: The other model has another shape.
    """
    source = checkpoint if init_from is None else open_checkpoint(init_from)
    opened = OpenedModel(source, dtype=mx.float32, packed=False, rebuild_masters=True)
    own, wanted = (replace(each.config, linears=None) for each in (opened.model, teacher))
    if own != wanted:
        raise TrainingError(
            f"[{command}] 'init_from' must be a model of the shape of 'model' but '{init_from}' is "
            "described otherwise. Give one that was made of it, as `mmfree calibrate` does."
        )
    return opened


def build_student(
    teacher: Decoder, config: Any, seed: int, *, random_mixers: bool = False
) -> Decoder:
    """A student with the teacher's weights, and with mixers that begin as its attention where they can.

    A projection of a mixer takes the weights of the attention's projection with the same role if
    their shapes agree: of queries, keys, values and outputs; what a recurrence takes in begins as
    values. Keys and values that heads share are repeated. Gates are random.

    Args:
        teacher: The teacher, with float weights or codes, which the student takes over.
        config: Of `student_config`.
        seed: Of the random weights.
        random_mixers: Whether all weights of new mixers are random.
    """
    mx.random.seed(seed)
    student: Decoder = architecture_of(config).build(config)
    known = dict(tree_flatten(in_floats(teacher).parameters()))
    own = dict(tree_flatten(student.parameters()))
    replaced = [f"blocks.{n}.token_mixer." for n in replaced_layers(student)]
    same = {
        name: known[name]
        for name, array in own.items()
        if name in known
        and known[name].shape == array.shape
        and not name.startswith(tuple(replaced))
    }
    student.update(tree_unflatten(list(same.items())))
    for number in [] if random_mixers else replaced_layers(student):
        _begin_as(student.blocks[number].token_mixer, teacher.blocks[number].token_mixer)
    return student


def replaced_layers(student: Decoder) -> list[int]:
    """The numbers of the layers whose attention was replaced."""
    config = student.config
    if not isinstance(config, HybridConfig):
        return []
    return [n for n, choice in enumerate(config.token_mixers) if choice.name != ATTENTION]


def _begin_as(mixer: nn.Module, attention: Any) -> None:
    for name, role in _ROLES.items():
        module = mixer.get(name)
        if module is None or "weight" not in module:
            continue
        weight = attention[role].weight
        if role in ("key_proj", "value_proj") and module.weight.shape != weight.shape:
            weight = _repeated(weight, attention.num_heads, attention.num_kv_heads)
        if module.weight.shape == weight.shape:
            module.weight = weight


def _repeated(weight: mx.array, num_heads: int, num_kv_heads: int) -> mx.array:
    """The rows of each head of keys or values `(G * K, D)` once for each query head `(H * K, D)`."""
    rows, dims = weight.shape
    heads = weight.reshape(num_kv_heads, rows // num_kv_heads, dims)
    return mx.repeat(heads, num_heads // num_kv_heads, axis=0).reshape(-1, dims)


_SHARE = 0.3
"""The share of a GPU's bound that training reaches. Assumed: this library has timed no such training."""

_APPLE = ("M2", "M4", "M4 Pro", "M4 Max")


@dataclass(frozen=True)
class Machine:
    """A machine that could do a run.

    Attributes:
        rate: Operations a second in training.
        source: Where the rate comes from.
    """

    rate: float
    source: str


def apple(name: str) -> Machine:
    """A chip of `mmfree bench --bound`, whose multiply-adds are two operations each."""
    of = chip(name)
    bound = 2 * of.rate
    return Machine(_SHARE * bound, f"{bound / 1e12:.3g} of its {of.cores} GPU cores at most")


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "2 CPU cores": Machine(
            0.154e12, "`examples/benchmarks/training.py` on an AMD EPYC with AVX-512, in float32"
        ),
        **{name: apple(name) for name in _APPLE},
        "H100": Machine(_SHARE * 989e12, "989 of bfloat16 products by NVIDIA's data sheet"),
    }
)
"""Machines by their names. None of the GPUs was at hand."""


@dataclass(frozen=True)
class Effort:
    """The work of a stage.

    Attributes:
        tokens: The tokens that it reads.
        operations: Multiplications and additions for each of them.
    """

    tokens: int
    operations: int

    @property
    def total(self) -> int:
        """The operations of the stage."""
        return self.tokens * self.operations

    def hours(self, machine: str) -> float:
        """An estimate of its time, by the rate of a machine in `MACHINES`."""
        return self.total / MACHINES[machine].rate / 3600


def effort_of(
    name: StageName, teacher: Decoder, student: Decoder, settings: DistilSettings
) -> Effort:
    r"""The work of a stage, counted from the shapes of matrices.

    A matrix of :math:`n` weights takes :math:`2n` operations a token forward, as many for the gradient
    of what it reads, and as many for its own. Attention takes :math:`2 d (L + 1)` forward, for heads of
    :math:`d` dims together and :math:`L` tokens, and twice that backward. Recurrences, norms, all that
    is elementwise, and validations are left out.

    Args:
        name: The stage.
        teacher: The teacher.
        student: The student.
        settings: The run.
    """
    length = settings.sequence_length
    replaced = replaced_layers(student)
    of_teacher, own = (_forward(model, length) for model in (teacher, student))
    head = 2 * student.num_logits * student.dims
    mixers = sum(2 * _weights(student.blocks[n].token_mixer) for n in replaced)
    again = own if settings.grad_checkpoint else 0
    if name == "mixers":
        attention = sum(2 * _weights(teacher.blocks[n].token_mixer) for n in replaced)
        attention += len(replaced) * _attention(teacher, length)
        operations = of_teacher + attention + 3 * mixers
    elif name == "hidden":
        operations = of_teacher + 2 * own + mixers + again
    else:
        # a large vocabulary's logits are computed in blocks, and again in the backward pass
        targets = settings.batch_size * length
        times = 1 if logits_at_a_time(student, targets) == targets * student.num_logits else 2
        # a head that stays has no gradient of its own
        backward = 1 if settings.keep_embedding else 2
        operations = 3 * own + again + (times + backward) * head
        if name == "logits":
            operations += of_teacher + (1 if settings.cache_logits else times) * head
    steps: int = getattr(settings, f"{name}_steps")
    return Effort(steps * settings.rows * length, operations)


def _forward(model: Decoder, length: int) -> int:
    """The operations of all blocks for a token."""
    unchanged = len(model.blocks) - len(replaced_layers(model))
    return sum(2 * _weights(block) for block in model.blocks) + unchanged * _attention(
        model, length
    )


def _attention(model: Decoder, length: int) -> int:
    """The input of queries, keys and values of a layer, as the mean of all positions."""
    base = model.config.base if isinstance(model.config, HybridConfig) else model.config
    return 2 * base.num_attention_heads * base.head_dim * (length + 1)


def _weights(module: nn.Module) -> int:
    return sum(matrix.input_dims * matrix.output_dims for matrix in matrices(module).values())
