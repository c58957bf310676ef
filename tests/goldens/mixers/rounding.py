"""The rule for layers that round their inputs to 8 bits: a value between two codes may get either."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mmfree.layers import BitLinear
from tests.goldens.mixers.files import assert_close

NEAR = 2e-4
"""A scaled input so near to the middle of two codes can get either, in float32."""


class Watched(nn.Module):
    """A ternary linear, perhaps with a norm before it, that notes rows with inputs between two codes.

    Args:
        linear: The layer.
        norm: Applied before it.
    """

    def __init__(self, linear: BitLinear, norm: nn.Module | None = None):
        super().__init__()
        self.linear = linear
        if norm is not None:
            self.norm = norm
        self._between: list[np.ndarray] = []

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.norm(x) if "norm" in self else x
        normed = np.array(self.linear.norm(y) if "norm" in self.linear else y, np.float64)
        largest = np.abs(normed).max(axis=-1, keepdims=True)
        scaled = np.abs(normed) * 127 / np.maximum(largest, 1e-30)
        self._between.append((np.abs(scaled % 1 - 0.5) < NEAR).any(axis=-1))
        z: mx.array = self.linear(y)
        return z

    @property
    def between(self) -> np.ndarray:
        """True if each row had such an input; positions of several calls follow each other."""
        return np.concatenate(self._between, axis=-1)


def assert_close_rounded(got: mx.array, want: mx.array, *layers: Watched) -> None:
    """Asserts 1e-5, but in rows that a code between two could reach 2e-3.

    Later positions of a sequence are reached by earlier ones.
    """
    between = np.any([layer.between for layer in layers], axis=0)
    if between.ndim > 1:
        between = np.maximum.accumulate(between, axis=1)
    between = mx.array(between)[..., None]
    assert_close(got, want, 2e-3)
    assert_close(mx.where(between, want, got), want)
