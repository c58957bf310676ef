"""Convolution of all channels of a map, as one product."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..arguments import check_counts, check_features, check_sizes
from ..linear_factory import LinearFactory
from ..stored_layout import StoredLayout
from .batch_norm import BatchNorm


class Convolution(nn.Module):
    r"""Convolution whose windows are gathered and multiplied by one matrix.

    .. math::
        y_{i,j} = W\,[x_{s i + u - p,\, s j + v - p}]_{u,v=0..k-1} + b

    with zeros beyond the map. The matrix is a linear layer like any other: dense, ternary, packed,
    quantised or with LoRA.

    Args:
        dims: Channels `D`.
        output_dims: Channels `E` of the result.
        kernel_size: Side `k` of a window.
        stride: Step `s` from window to window.
        padding: Zeros `p` on each side. Default: `k // 2`, or 0 where windows lie side by side.
        bias: Whether there is `b`.
        norm: Of the result; part of the layer, so that both are one product in evaluation.
        linear: Makes the matrix, called as `linear(input_dims, output_dims, bias=...)`.

    Shape:
        `x`: `(B, H, W, D)`; `y`: `(B, (H + 2p - k) / s + 1, (W + 2p - k) / s + 1, E)`, rounded down.

    Raises:
        ValueError: The map is smaller than a window.

    Example:
        >>> Convolution(3, 8, 3, stride=2)(mx.zeros((1, 9, 6, 3))).shape
        (1, 5, 3, 8)
    """

    def __init__(
        self,
        dims: int,
        output_dims: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        bias: bool = True,
        norm: BatchNorm | None = None,
        linear: LinearFactory = nn.Linear,
    ):
        super().__init__()
        check_sizes(
            "Convolution",
            dims=dims,
            output_dims=output_dims,
            kernel_size=kernel_size,
            stride=stride,
        )
        padding = (kernel_size // 2 if kernel_size != stride else 0) if padding is None else padding
        check_counts("Convolution", padding=padding)
        self._dims = dims
        self._side = kernel_size
        self._stride = stride
        self._padding = padding
        self.linear = linear(kernel_size * kernel_size * dims, output_dims, bias=bias)
        self._output_dims = output_dims
        if norm is not None:
            self.norm = norm

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        layout = StoredLayout.convolution(self._output_dims, self._dims, self._side)
        return {"linear.weight": layout}

    def __call__(self, x: mx.array) -> mx.array:
        check_features("Convolution", x, self._dims)
        side, pad = self._side, self._padding
        if min(x.shape[1:3]) + 2 * pad < side:
            raise ValueError(
                f"[Convolution] 'x' must be at least {side - 2 * pad} places high and wide but got "
                f"shape {x.shape}."
            )
        if side == 1:
            windows = x[:, :: self._stride, :: self._stride]
        else:
            if pad:
                x = mx.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
            windows = mx.concatenate(
                [self._shifted(x, row, column) for row in range(side) for column in range(side)],
                axis=-1,
            )
        if "norm" in self:
            return self.norm.of_linear(self.linear, windows)
        y: mx.array = self.linear(windows)
        return y.astype(x.dtype)

    def _shifted(self, x: mx.array, row: int, column: int) -> mx.array:
        """What the windows hold at one place of theirs."""
        height, width = ((size - self._side) // self._stride for size in x.shape[1:3])
        rows = slice(row, row + height * self._stride + 1, self._stride)
        columns = slice(column, column + width * self._stride + 1, self._stride)
        return x[:, rows, columns]


def pointwise(linear: LinearFactory) -> LinearFactory:
    """Makes projections of places that published files lay out as convolutions of one place each."""
    return partial(Convolution, kernel_size=1, linear=linear)
