"""One bit a weight, with a scale for each group of inputs, after the signs of some inputs were turned.

A linear `X` of N outputs and D inputs has

- `X.weight`, `uint8` of shape `(N, D / 8)`: bit `i` of byte `j` of a row is 1 where the weight of input
  `8 j + i` is positive;
- `X.scales`, floats of shape `(N, D / group_size)`, by which signs are multiplied;
- `X.turned`, `int8` of shape `(D,)`, 1 or -1: the input is multiplied by it before the product.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub.checkpoint.weight_format import StoredMatrix, UnreadMatrix, WeightFormat
from mlx_mmfree.layers.matrix import Matrix

SECTION = "sign_quantization"


class SignLinear(Matrix, nn.Module):
    """Multiplies by signs and their scales, after a rotation of the input."""

    def __init__(self, input_dims: int, output_dims: int, group_size: int):
        super().__init__()
        self._group_size = group_size
        self.weight = mx.zeros((output_dims, input_dims // 8), mx.uint8)
        self.scales = mx.zeros((output_dims, input_dims // group_size))
        self.turned = mx.ones((input_dims,), mx.int8)
        self.freeze(recurse=False, keys=["weight", "turned"])

    @classmethod
    def of(cls, weight: mx.array, group_size: int) -> "SignLinear":
        """The nearest matrix of this format."""
        outputs, inputs = weight.shape
        made = cls(inputs, outputs, group_size)
        made.turned = mx.where(mx.arange(inputs) % 3 == 0, -1, 1).astype(mx.int8)
        turned = weight * made.turned
        bits = (turned > 0).reshape(outputs, -1, 8).astype(mx.uint8)
        made.weight = (bits << mx.arange(8, dtype=mx.uint8)).sum(axis=-1).astype(mx.uint8)
        made.scales = mx.abs(turned).reshape(outputs, -1, group_size).mean(axis=-1)
        return made

    @property
    def input_dims(self) -> int:
        return 8 * int(self.weight.shape[1])

    @property
    def output_dims(self) -> int:
        return int(self.weight.shape[0])

    @property
    def group_size(self) -> int:
        return self._group_size

    @property
    def fixed_dtypes(self) -> tuple[str, ...]:
        return ("weight", "turned")

    @property
    def dtype(self) -> mx.Dtype:
        return self.scales.dtype

    def _signs(self, parts: Mapping[str, mx.array]) -> mx.array:
        bits = parts["weight"][..., None] >> mx.arange(8, dtype=mx.uint8) & 1
        signs = 2.0 * bits.reshape(self.output_dims, -1) - 1
        return signs * mx.repeat(parts["scales"].astype(mx.float32), self.group_size, axis=1)

    def written_out(self, parts: Mapping[str, mx.array]) -> mx.array:
        return self._signs(parts) * parts["turned"]

    def multiply(self, x: mx.array) -> mx.array:
        return (x.astype(mx.float32) * self.turned) @ self._signs(self).T

    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x).astype(x.dtype)


def _check(entry: Any) -> None:
    if not isinstance(entry, Mapping) or entry.get("group_size") not in (16, 32):
        raise UnsupportedModelError(
            f"[config.json] {SECTION!r} must have a 'group_size' of 16 or 32 but got {entry!r:.80}."
        )


def _open(found: Mapping[str, UnreadMatrix]) -> dict[str, StoredMatrix]:
    return {
        path: StoredMatrix(
            SignLinear(matrix.input_dims, matrix.output_dims, int(entry["group_size"]))
        )
        for path, (matrix, _, tensors, entry) in found.items()
        if matrix.is_plain and not matrix.is_embedding and "turned" in tensors
    }


def _describe(matrices_by_path: Mapping[str, Matrix], config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = [
        matrix.group_size for matrix in matrices_by_path.values() if isinstance(matrix, SignLinear)
    ]
    return {SECTION: {"group_size": sizes[0]}} if sizes else {}


FORMAT = WeightFormat(
    name="signs",
    open=_open,
    section=SECTION,
    check=_check,
    is_for_all=True,
    describe=_describe,
    words="Weights are signs with a scale for each group of inputs.",
)
