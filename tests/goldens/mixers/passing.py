"""Mixers whose projections only pass on parts of the input, for files that hold queries and keys."""

from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

M = TypeVar("M", bound=nn.Module)


def passing(mixer: M, widths: dict[str, int], output_dims: int) -> M:
    """A mixer without biases whose projections pass on the input's parts, one after the other.

    Args:
        mixer: It is changed.
        widths: The sizes of the parts, by the names of the projections.
        output_dims: Its results come first in the output, followed by zeros.
    """
    dims, start = sum(widths.values()), 0
    for name, width in widths.items():
        mixer[name].weight = mx.eye(dims)[start : start + width]
        start += width
    mixer["output_proj"].weight = mx.eye(dims)[:, :output_dims]
    return mixer


def side_by_side(*parts: mx.array) -> mx.array:
    """Parts `(B, T, H, N)` one after the other, `(B, T, sum of H * N)`."""
    return mx.concatenate([mx.flatten(part, 2) for part in parts], axis=-1)


def apart(y: mx.array, shape: tuple[int, ...]) -> mx.array:
    """The first numbers of each position as heads `(B, T, H, N)`."""
    return y[..., : shape[2] * shape[3]].reshape(shape)
