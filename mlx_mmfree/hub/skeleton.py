"""A model without its weights, compared with the tensors that a checkpoint holds.

MLX is lazy: a model takes no memory for weights that are replaced before they are evaluated, so a
configuration is compared with the file before anything of its size is allocated.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import CheckpointError
from ..layers import PackedBitLinear
from ..models import Decoder, find
from .checkpoint import Checkpoint
from .names import WeightNames
from .packed_format import check_packing
from .safetensors import TensorEntry, read_tensors

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_SHOWN = 5


@dataclass
class Skeleton:
    """A model that waits for its weights.

    Attributes:
        model: The model; its linears are packed where the checkpoint's are.
        names: Names on disk and in memory.
        entries: For each parameter of the model, by its name in memory, its tensor on disk.
    """

    model: Decoder
    names: WeightNames
    entries: dict[str, TensorEntry]


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """The parameters of a model by their names in memory."""
    return dict(tree_flatten(model.parameters()))


def kept_names(model: nn.Module) -> set[str]:
    """Parameters whose dtype never changes: those of packed matrices."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, PackedBitLinear)
        for name in ("weight", "scale")
    }


def build_skeleton(checkpoint: Checkpoint) -> Skeleton:
    """Builds the model of a checkpoint and finds the tensor of each of its parameters.

    Raises:
        UnsupportedModelError: The architecture or an option is not implemented.
        CheckpointError: The configuration is damaged, or the tensors do not belong to it.
    """
    architecture = find(checkpoint.config.get("model_type"))
    check_packing(checkpoint.config)
    model = architecture.build(architecture.Config.from_hub(checkpoint.config))
    names = WeightNames(architecture.WEIGHT_NAMES)
    model.update_modules(
        tree_unflatten(
            [
                (path, module.to_packed())
                for path, module in model.named_modules()
                if hasattr(module, "to_packed")
                and names.to_disk(f"{path}.scale") in checkpoint.tensors
            ]
        )
    )
    return Skeleton(model, names, _match(model, names, checkpoint))


def _match(model: Decoder, names: WeightNames, checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    expected = parameters(model)
    entries: dict[str, TensorEntry] = {}
    tied_copies = []
    unexpected = []
    for disk_name, entry in checkpoint.tensors.items():
        name = names.to_memory(disk_name)
        if name in expected:
            entries[name] = entry
        elif name == "head.weight" and getattr(model.config, "tie_word_embeddings", False):
            tied_copies.append(entry)
        elif not names.is_unused(disk_name):
            unexpected.append(disk_name)
    missing = [names.to_disk(name) for name in expected if name not in entries]
    if missing:
        raise _listing(checkpoint, "lacks", missing)
    if unexpected:
        raise _listing(checkpoint, "has unexpected", unexpected)
    for name, array in expected.items():
        _check_entry(entries[name], array)
    for entry in tied_copies:
        _check_tied_copy(entry, entries["embed.weight"])
    return entries


def _listing(checkpoint: Checkpoint, verb: str, names: list[str]) -> CheckpointError:
    shown = ", ".join(f"{name!r:.100}" for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return CheckpointError(
        f"[load] '{checkpoint.folder}' {verb} tensors of this architecture: {len(names)}, namely "
        f"{shown}{more}. Check that config.json and the weights belong together and are complete."
    )


def _check_entry(entry: TensorEntry, array: mx.array) -> None:
    if entry.shape != array.shape:
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must have shape {array.shape}, as "
            f"config.json says, but has {entry.shape}."
        )
    allowed = FLOATS if array.dtype in FLOATS else (array.dtype,)
    if entry.dtype not in allowed:
        known = ", ".join(_name(dtype) for dtype in allowed)
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be {known} but is "
            f"{_name(entry.dtype)}."
        )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _check_tied_copy(copy: TensorEntry, embedding: TensorEntry) -> None:
    """Many writers store a tied head once more; another matrix would change the model."""
    same = (copy.shape, copy.dtype) == (embedding.shape, embedding.dtype)
    if not same or not mx.array_equal(_read_bits(copy), _read_bits(embedding)).item():
        raise CheckpointError(
            f"[load] tensor {copy.name!r} in '{copy.file}' must equal {embedding.name!r}, since "
            "config.json sets 'tie_word_embeddings', but differs. Set it to false if the head is "
            "a matrix of its own."
        )


def _read_bits(entry: TensorEntry) -> mx.array:
    [(_, array)] = read_tensors(entry.file, [entry])
    return array.view(mx.uint8)
