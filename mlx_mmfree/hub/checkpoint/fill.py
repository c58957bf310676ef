"""Fills a model with its weights tensor by tensor. Each is checked, and packed if it is to be."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...files.tensor_entry import TensorEntry, read_tensors
from ...layers.matrix import matrices, matrix_of
from ...models import Decoder
from ...ops import ternarize_packed
from ...ops.host_blocks import all_finite
from .forms.packed_format import has_valid_codes
from .forms.ternary_values import pack_ternary_values, simplify_affine
from .skeleton import Skeleton


def fill(skeleton: Skeleton) -> Decoder:
    """Reads the weights into the model, in the dtypes of the file. Each matrix is packed as it arrives.

    Raises:
        CheckpointError: A tensor cannot be read, or is damaged.
    """
    model = skeleton.model
    modules = dict(model.named_modules())
    is_ternary = any(matrix.is_ternary for matrix in matrices(model).values())
    packs_values = skeleton.is_packed and not is_ternary
    sharing: dict[str, list[str]] = {}
    for path, name in skeleton.masters.items():
        sharing.setdefault(name, []).append(path)
    for name, array, entry in _arrays(skeleton):
        path, _, key = name.rpartition(".")
        module = modules[path]
        if name in skeleton.forms:
            array = skeleton.forms[name].read(array)
            mx.eval(array)
        for master_path in sharing.get(name, ()):
            _pack(modules[master_path], array, entry)
        if skeleton.masters.get(path) == name:
            continue
        setattr(module, key, array)
        matrix = matrix_of(module)
        if matrix is not None and matrix.storage == "trits" and key in matrix.kept:
            check_packed(array, key, matrix.input_dims, entry)
            continue
        check_finite(array, entry)
        is_plain = matrix is not None and matrix.is_plain and not matrix.is_embedding
        if packs_values and is_plain and key == "weight":
            modules[path] = _pack_values(model, path, module)
    if packs_values:
        simplify_affine(model)
    # frees the memory in which one float matrix after the other was read
    mx.clear_cache()
    return model


def _arrays(skeleton: Skeleton) -> Iterator[tuple[str, mx.array, TensorEntry]]:
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for name, entry in skeleton.entries.items():
        by_file.setdefault(entry.file, []).append((name, entry))
    for file, named in by_file.items():
        named.sort(key=lambda item: item[1].start)
        arrays = read_tensors(file, (entry for _, entry in named))
        for (name, entry), (_, array) in zip(named, arrays, strict=True):
            yield name, array, entry


def _pack(packed: nn.Module, master: mx.array, entry: TensorEntry) -> None:
    packed.weight, packed.scale = ternarize_packed(master)
    mx.eval(packed.weight, packed.scale)
    check_finite(packed.scale, entry)


def _pack_values(model: Decoder, path: str, linear: nn.Linear) -> nn.Module:
    """Packs a dense linear whose values are ternary. Any other stays as it is."""
    packed = pack_ternary_values(linear)
    if packed is None:
        return linear
    mx.eval(packed.parameters())
    model.update_modules(tree_unflatten([(path, packed)]))
    mx.clear_cache()
    return packed


def check_finite(array: mx.array, entry: TensorEntry) -> None:
    """Refuses NaN and infinity.

    Raises:
        CheckpointError: The tensor holds NaN or infinity.
    """
    # codes of MLX's affine form are whole numbers
    if mx.issubdtype(array.dtype, mx.floating) and not all_finite(array):
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be finite but holds NaN or "
            "infinity. Fetch or make the checkpoint again."
        )


def check_packed(array: mx.array, key: str, input_dims: int, entry: TensorEntry) -> None:
    """Refuses codes or scales that no ternary matrix has.

    Args:
        array: The parameter.
        key: `"weight"`, or the name of its scales.
        input_dims: The columns of the matrix.
        entry: The tensor that was read.

    Raises:
        CheckpointError: The parameter is damaged.
    """
    if key != "weight":
        check_finite(array, entry)
        is_valid, rule = mx.all(array > 0).item(), "be positive"
    else:
        is_valid = has_valid_codes(array, input_dims)
        rule = "hold ternary codes"
    if not is_valid:
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must {rule} but does not. Fetch or "
            "make the checkpoint again."
        )
