"""Finds the tensor of each parameter of a model among those of a checkpoint, and compares the two."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ...errors import CheckpointError
from ...files.tensor_entry import TensorEntry, read_tensor
from ...layers.matrix import kept_names, matrices, parameters
from ...models import Decoder
from ...models.parts.architecture import Config
from ...ops.float_dtypes import FLOATS
from ..names import WeightNames
from .checkpoint import Checkpoint

EMBEDDING = "embed.weight"
"""The matrix that a tied head shares, by its name in memory."""

_SHOWN = 5
_TIED = "Set 'tie_word_embeddings' in config.json to true if the head is the embedding."
_WAY_OUT = "Check that config.json and the weights belong together and are complete."


@dataclass(frozen=True)
class StoredForm:
    """How a parameter is stored.

    Attributes:
        shapes: The shapes that the tensor may have.
        dtypes: The dtypes that it may have.
        read: Turns the tensor into the parameter.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    read: Callable[[mx.array], mx.array]


def match(
    model: Decoder, names: WeightNames, forms: dict[str, StoredForm], checkpoint: Checkpoint
) -> dict[str, TensorEntry]:
    """The tensor of each stored parameter, by the name of the parameter in memory.

    Args:
        model: The model.
        names: Names on disk and in memory.
        forms: How a parameter is stored where that differs from its form in memory, by name in memory.
        checkpoint: The checkpoint.

    Raises:
        CheckpointError: A tensor is missing, is not expected, or has another shape or dtype.
    """
    expected = parameters(model)
    copies = _scale_copies(model)
    entries: dict[str, TensorEntry] = {}
    seconds: list[tuple[str, bool, TensorEntry]] = []
    unexpected = []
    for disk_name, entry in checkpoint.tensors.items():
        name = names.to_memory(disk_name)
        if name in expected:
            entries[name] = entry
        elif name == "head.weight" and getattr(model.config, "tie_word_embeddings", False):
            seconds.append((EMBEDDING, True, entry))
        elif (second := names.second_name(disk_name)) is not None and second[0] in expected:
            seconds.append((*second, entry))
        elif not names.is_unused(disk_name) and name not in copies:
            unexpected.append(disk_name)
    copies_of = []
    for name, is_copy, entry in seconds:
        if name not in entries:
            entries[name] = entry
        elif is_copy:
            copies_of.append((entry, entries[name]))
    missing = [names.to_disk(name) for name in expected if name not in entries]
    if missing:
        raise _listing(checkpoint, "lacks", missing)
    if unexpected:
        raise _listing(checkpoint, "has unexpected", unexpected)
    kept = kept_names(model)
    for name, array in expected.items():
        allowed = FLOATS if array.dtype in FLOATS and name not in kept else (array.dtype,)
        form = forms.get(name, StoredForm((array.shape,), allowed, mx.array))
        _check_entry(entries[name], form)
        if name.endswith(".biases"):
            _check_biases(entries[name], entries[name.removesuffix("biases") + "scales"])
    for copy, original in copies_of:
        _check_copy(copy, original, model.config)
    return entries


def _scale_copies(model: Decoder) -> set[str]:
    """The names of the scales that the affine form repeats, rounded, for each group of inputs."""
    return {
        f"{path}.{key}"
        for path, matrix in matrices(model).items()
        if matrix.is_ternary and matrix.storage == "trits"
        for key in ("scales", "biases")
    }


def _listing(checkpoint: Checkpoint, verb: str, names: list[str]) -> CheckpointError:
    shown = ", ".join(f"{name!r:.100}" for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    way_out = _TIED if names == ["lm_head.weight"] and verb == "lacks" else _WAY_OUT
    return CheckpointError(
        f"[load] '{checkpoint.folder}' {verb} tensors of this architecture: {len(names)}, namely "
        f"{shown}{more}. {way_out}"
    )


def _check_entry(entry: TensorEntry, form: StoredForm) -> None:
    if entry.shape not in form.shapes:
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must have shape {form.shapes[0]}, as "
            f"config.json says, but has {entry.shape}. {_WAY_OUT}"
        )
    if entry.dtype not in form.dtypes:
        known = ", ".join(_name(dtype) for dtype in form.dtypes)
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be {known} but is "
            f"{_name(entry.dtype)}. {_WAY_OUT}"
        )


def _check_biases(biases: TensorEntry, scales: TensorEntry) -> None:
    if biases.dtype != scales.dtype:
        raise CheckpointError(
            f"[load] tensor {biases.name!r} in '{biases.file}' must be {_name(scales.dtype)}, as "
            f"{scales.name!r} is, but is {_name(biases.dtype)}. {_WAY_OUT}"
        )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _check_copy(copy: TensorEntry, original: TensorEntry, config: Config) -> None:
    """Refuses another tensor in place of one that is tied, which many writers store once more."""
    same = (copy.shape, copy.dtype) == (original.shape, original.dtype)
    if same and mx.array_equal(_read_bits(copy), _read_bits(original)).item():
        return
    if hasattr(config, "tie_word_embeddings"):
        why = "since config.json sets 'tie_word_embeddings'"
        way_out = "Set it to false if the head is a matrix of its own."
    else:
        why = "to which this architecture ties it"
        way_out = "Leave out the one that was not trained."
    raise CheckpointError(
        f"[load] tensor {copy.name!r} in '{copy.file}' must equal {original.name!r}, {why}, but "
        f"differs. {way_out}"
    )


def _read_bits(entry: TensorEntry) -> mx.array:
    return read_tensor(entry).view(mx.uint8)
