"""How long a run will take: its tokens, the operations of a token, and the rates of machines."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import mlx.nn as nn

from ...layers.matrix import matrices
from ...models import Decoder
from ...models.parts.hybrid_config import Config
from ..batches import Batch
from ..loss import kept_logits
from .settings import DistilSettings, StageName
from .student import replaced_layers

_SHARE = 0.4
"""What training keeps of a GPU's rate of large products. Assumed: this library has trained on none."""


@dataclass(frozen=True)
class Machine:
    """A machine that a run could take place on.

    Attributes:
        rate: Operations a second in training.
        source: Where the rate comes from.
    """

    rate: float
    source: str


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "2 CPU cores": Machine(
            0.154e12, "`examples/benchmarks/training.py` on an AMD EPYC with AVX-512, in float32"
        ),
        "M4": Machine(
            _SHARE * 2.78e12, "2.78 TFLOP/s of bfloat16 products measured with MLX on a MacBook Air"
        ),
        "M3 Max": Machine(_SHARE * 11e12, "11 TFLOP/s of products measured with MLX, issue 3863"),
        "H100": Machine(_SHARE * 989e12, "989 TFLOP/s of bfloat16 products, NVIDIA's data sheet"),
    }
)
"""Machines by their names. None of the GPUs was at hand."""


@dataclass(frozen=True)
class Effort:
    """What a stage computes.

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
    name: StageName, teacher: Decoder, student: Decoder, settings: DistilSettings, batch: Batch
) -> Effort:
    r"""What a stage computes, counted from the shapes of matrices.

    A matrix of :math:`n` weights takes :math:`2n` operations a token forward, as many for the gradient
    of what it reads, and as many for its own. Attention takes :math:`2 d (L + 1)` forward, for heads of
    :math:`d` dims together and :math:`L` tokens, and twice that backward. Recurrences, norms, all that
    is elementwise, and validations are left out.

    Args:
        name: The stage.
        teacher: The teacher.
        student: The student.
        settings: The run.
        batch: The largest batch.
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
        times = 1 if kept_logits(student, batch) == batch.targets.size * student.num_logits else 2
        # a head that stays has no gradient of its own
        backward = 1 if settings.keep_embedding else 2
        operations = 3 * own + again + (times + backward) * head
        if name == "logits":
            operations += of_teacher + (1 if settings.cache_logits else times) * head
    steps: int = getattr(settings, f"{name}_steps")
    return Effort(steps * settings.rows * length, operations)


def _forward(model: Decoder, length: int) -> int:
    """The operations of all blocks for a token."""
    kept = len(model.blocks) - len(replaced_layers(model))
    return sum(2 * _weights(block) for block in model.blocks) + kept * _attention(model, length)


def _attention(model: Decoder, length: int) -> int:
    """What queries, keys and values of a layer take, the mean of all places."""
    base = model.config.base if isinstance(model.config, Config) else model.config
    return 2 * base.num_attention_heads * base.head_dim * (length + 1)


def _weights(module: nn.Module) -> int:
    return sum(matrix.input_dims * matrix.output_dims for matrix in matrices(module).values())
