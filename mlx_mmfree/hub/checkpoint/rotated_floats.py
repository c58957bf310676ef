"""Holds rotated matrices that are stored as floats.

Those that are ternary in groups of 128 inputs become codes of 2 bits, without loss, and stay rotated.
Others are rotated back in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...files.tensors import TensorEntry, read_tensor
from ...ops import hadamard, pack_ternary
from ...ops.device import FLOATS

SIGNS = "signs"
"""The suffix of a module's name in the name of its signs."""

_GROUP = 128
"""The inputs that share a scale in PrismML's formats."""

_PROBED_ROWS = 4
_BITS = {2: mx.uint16, 4: mx.uint32}


def without_rotated_floats(
    modules: Sequence[Mapping[str, Any]], tensors: Mapping[str, TensorEntry]
) -> tuple[list[Mapping[str, Any]], dict[str, TensorEntry]]:
    """Rotated modules and tensors in which no rotated matrix has floats.

    Args:
        modules: The rotated modules, each with its `path` and its `block`.
        tensors: All tensors by their names, signs among them.

    Returns:
        The modules that stay rotated, and the tensors.

    Raises:
        CheckpointError: A file cannot be read.
    """
    rotated, found = list[Mapping[str, Any]](), dict(tensors)
    for module in modules:
        path = module["path"]
        entry = found.get(f"{path}.weight")
        if entry is None or entry.dtype not in FLOATS:
            rotated.append(module)
        elif _is_ternary(entry):
            rotated.append(module)
            del found[entry.name]
            found |= {each.name: each for each in _codes(entry, path)}
        else:
            signs = read_tensor(found.pop(f"{path}.{SIGNS}"))
            turned = partial(_unfold, entry, module["block"], signs)
            found[entry.name] = replace(entry, dtype=mx.float32, decode=turned)
    return rotated, found


def _is_ternary(entry: TensorEntry) -> bool:
    """Returns whether the first rows of a matrix are ternary in groups."""
    rows, dims = entry.shape
    if dims % _GROUP:
        return False
    if entry.decode is None:
        rows = min(rows, _PROBED_ROWS)
        stop = entry.start + rows * dims * entry.dtype.size
        entry = replace(entry, shape=(rows, dims), stop=stop, checksum=None)
    trits, _ = _trits(read_tensor(entry))
    return trits is not None


def _trits(matrix: mx.array) -> tuple[mx.array | None, mx.array]:
    """The trits of a matrix `(N, D)`, `None` if there are none, and scales `(N, D / _GROUP)`."""
    groups = matrix.reshape(len(matrix), -1, _GROUP)
    sizes = mx.abs(groups)
    scales = sizes.max(axis=-1, keepdims=True)
    is_ternary = mx.all(mx.logical_or(sizes == scales, groups == 0)).item()
    return (mx.sign(matrix) if is_ternary else None), scales[..., 0]


def _codes(entry: TensorEntry, module: str) -> list[TensorEntry]:
    """The tensors of MLX's affine format that a ternary matrix becomes."""
    rows, dims = entry.shape
    parts = {
        "weight": (mx.uint32, dims // 16),
        "scales": (entry.dtype, dims // _GROUP),
        "biases": (entry.dtype, dims // _GROUP),
    }
    return [
        replace(
            entry,
            name=f"{module}.{key}",
            dtype=dtype,
            shape=(rows, columns),
            decode=partial(_decode, entry, key),
        )
        for key, (dtype, columns) in parts.items()
    ]


def _matrix(entry: TensorEntry, data: np.ndarray) -> mx.array:
    numbers = data if entry.decode is None else entry.decode(data)
    bits = np.ascontiguousarray(numbers).reshape(-1).view(f"<u{entry.dtype.size}")
    return mx.array(bits).view(entry.dtype).reshape(entry.shape)


def _decode(entry: TensorEntry, key: str, data: np.ndarray) -> np.ndarray:
    trits, scales = _trits(_matrix(entry, data))
    if trits is None:
        raise CheckpointError(
            f"[load] the rotated {entry.name!r:.100} in '{entry.file}' must be ternary in groups of "
            f"{_GROUP} inputs, as its first rows are, but is not. Without the right rotation the model "
            "would write nonsense. Fetch the checkpoint again."
        )
    if key == "weight":
        return np.asarray(pack_ternary(trits))
    return np.asarray((scales if key == "scales" else -scales).view(_BITS[entry.dtype.size]))


def _unfold(entry: TensorEntry, block: int, signs: mx.array, data: np.ndarray) -> np.ndarray:
    rows = _matrix(entry, data).astype(mx.float32)
    return np.asarray(hadamard(rows, block, signs, inverse=True).view(mx.uint32))
