"""A linear layer whose weight is ternary up to a scale for each row or column."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops import packed_width, ternary_matmul
from .arguments import check_features, check_sizes
from .float32_scales import Float32Scales
from .matrix import Matrix


class PackedLinear(Matrix, Float32Scales):
    r"""The packed form of a dense linear layer whose stored weight is already ternary.

    .. math::
        y = ((x \odot c)\,t^\top) \odot r + b

    with trits :math:`t` and scales of rows :math:`r` and of columns :math:`c`. Activations stay floats;
    the arithmetic is float32, the result has the dtype of the input.

    Parameters are `weight`, `uint32` of shape `(output_dims, packed_width(input_dims))` in the layout
    of `ops.ternary`, `scale` :math:`r`, float32 of shape `(1,)` or `(output_dims,)`, `input_scale`
    :math:`c`, float32 of shape `(input_dims,)`, where present, and `bias` where present. `set_dtype`
    leaves the scales alone.

    Source: ternary weight networks (Li et al., arXiv 1605.04711), with a scale for each row or column.

    Args:
        input_dims: Size of the last axis of the input.
        output_dims: Size of the last axis of the result.
        bias: Whether a bias is added.
        has_row_scales: Whether each row has a scale of its own; otherwise one serves all.
        has_column_scales: Whether each column has a scale.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive.

    Example:
        >>> PackedLinear(64, 32)(mx.ones((2, 64))).shape
        (2, 32)
    """

    storage = "trits"

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = False,
        *,
        has_row_scales: bool = False,
        has_column_scales: bool = False,
    ):
        super().__init__()
        check_sizes("PackedLinear", input_dims=input_dims, output_dims=output_dims)
        self._input_dims, self._output_dims = input_dims, output_dims
        self.weight = mx.full((output_dims, packed_width(input_dims)), 0x55555555, dtype=mx.uint32)
        self.scale = mx.ones((output_dims if has_row_scales else 1,))
        if has_column_scales:
            self.input_scale = mx.ones((input_dims,))
        if bias:
            self.bias = mx.zeros((output_dims,))
        self.freeze(recurse=False, keys=list(self.kept))

    @property
    def input_dims(self) -> int:
        return self._input_dims

    @property
    def output_dims(self) -> int:
        return self._output_dims

    @property
    def kept(self) -> tuple[str, ...]:
        return ("weight", "scale", "input_scale") if "input_scale" in self else ("weight", "scale")

    def multiply(self, x: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        x = x * self.input_scale if "input_scale" in self else x
        y: mx.array = ternary_matmul(x, self.weight) * self.scale
        return y

    def unfreeze(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Unfreezes what can be trained; packed codes and their scales never are."""
        super().unfreeze(*args, **kwargs)
        self.freeze(recurse=False, keys=list(self.kept))
        return self

    def _extra_repr(self) -> str:
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, bias={'bias' in self}, "
            f"scale={self.scale.shape}, has_column_scales={'input_scale' in self}"
        )

    def __call__(self, x: mx.array) -> mx.array:
        check_features("PackedLinear", x, self.input_dims)
        # a GPU computes the gradient in the dtype that meets the matrix
        scaled = x.astype(mx.float32) * self.input_scale if "input_scale" in self else x
        y = ternary_matmul(scaled, self.weight, codes=False) * self.scale
        if "bias" in self:
            y = y + self.bias
        return y.astype(x.dtype)
