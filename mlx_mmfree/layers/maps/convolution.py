"""Convolution of all channels of a map, as one product."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ...ops.backend.gradient import with_reference_gradient
from ..arguments import check_counts, check_features, check_sizes
from ..linear_factory import LinearFactory
from ..projection import apply_linear
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
        if pad:
            x = mx.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
        windows = gather_windows(x, side, self._stride)
        if "norm" in self:
            return self.norm.of_linear(self.linear, windows)
        return apply_linear(self.linear, windows).astype(x.dtype)


def gather_windows(x: mx.array, side: int, stride: int) -> mx.array:
    """What each window holds, row by row.

    Args:
        x: Maps `(B, H, W, D)`.
        side: Side `k` of a window.
        stride: Step from window to window.

    Returns:
        `(B, (H - k) / stride + 1, (W - k) / stride + 1, k k D)`, rounded down.
    """
    batch, height, width, dims = x.shape
    rows, columns = ((size - side) // stride + 1 for size in (height, width))
    if side == 1:
        return x[:, ::stride, ::stride]
    if side == stride:
        whole = x[:, : rows * side, : columns * side]
        tiles = whole.reshape(batch, rows, side, columns, side * dims).swapaxes(2, 3)
        return tiles.reshape(batch, rows, columns, -1)
    gather = with_reference_gradient(
        partial(_read_windows, side=side, stride=stride),
        partial(_joined_slices, side=side, stride=stride),
    )
    windows: mx.array = gather(x)
    return windows


def _read_windows(x: mx.array, *, side: int, stride: int) -> mx.array:
    """The windows in one pass, in which a row of a window is one run of numbers."""
    batch, height, width, dims = x.shape
    rows, columns = ((size - side) // stride + 1 for size in (height, width))
    line = width * dims
    windows = mx.as_strided(
        x,
        (batch, rows, columns, side, side * dims),
        (height * line, stride * line, stride * dims, line, 1),
    )
    return windows.reshape(batch, rows, columns, -1)


def _joined_slices(x: mx.array, *, side: int, stride: int) -> mx.array:
    """The windows as slices of the map, whose gradient is a sum of slices."""
    height, width = ((size - side) // stride * stride + 1 for size in x.shape[1:3])
    return mx.concatenate(
        [
            x[:, row : row + height : stride, column : column + width : stride]
            for row in range(side)
            for column in range(side)
        ],
        axis=-1,
    )


def pointwise(linear: LinearFactory) -> LinearFactory:
    """Makes projections of places that published files lay out as convolutions of one place each."""
    return partial(Convolution, kernel_size=1, linear=linear)
