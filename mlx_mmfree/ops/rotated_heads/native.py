"""`rotated_heads` on the CPU in C++, in one pass. Its gradient is a kernel too.

MLX makes the rotation and its gradient of plain operations on a CPU, and copies heads into place.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import Rotation, reference


def unsupported(
    projected: mx.array,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> str | None:
    return None if projected.dtype in FLOATS else f"'projected' is {projected.dtype}"


def run(
    projected: mx.array,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    heads: tuple[mx.array, mx.array, mx.array] = _kernel()(
        projected, rotation.cosines, rotation.sines, num_heads, num_kv_heads, is_interleaved
    )
    return heads


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    queries, keys, values, cosines, sines = arrays
    turned = [reference.rotate(x, cosines, -sines, options[2]) for x in (queries, keys)]
    tokens = mx.concatenate([*turned, values], axis=1).swapaxes(1, 2)
    return [mx.flatten(tokens, 2)]


_kernel = native_kernel("rotated_heads", _gradient)
