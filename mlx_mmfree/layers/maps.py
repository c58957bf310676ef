"""The parts of image models: convolutions of maps, and the arguments of branches of blocks."""

import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..ops import depthwise_convolution
from ..ops.device import with_reference_gradient
from .arguments import check_counts, check_features, check_sizes
from .dense import Linear
from .matrix import StoredLayout
from .mixer import LinearFactory
from .norms import BatchNorm


class DropPath(nn.Module):
    """In training, a branch is left out for some samples and enlarged for the others; else it stays.

    Args:
        rate: How likely a sample goes without the branch, below 1.

    Shape:
        `x` and `y`: `(B, ...)`.

    Raises:
        ValueError: The rate is no probability below 1.

    Example:
        >>> DropPath(0.1).eval()(mx.ones((1, 2)))
        array([[1, 1]], dtype=float32)
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"[DropPath] 'rate' must be from 0 to below 1 but got {rate!r:.80}.")
        self._rate = rate

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training or not self._rate:
            return x
        mask = mx.random.bernoulli(1 - self._rate, (x.shape[0], *[1] * (x.ndim - 1)))
        return mx.where(mask, x / (1 - self._rate), mx.zeros((), x.dtype))


class LayerScale(nn.Module):
    r"""Multiplies each channel by a number of its own, :math:`y_c = \gamma_c\,x_c`.

    Args:
        dims: Channels `D`.
        initial: All numbers at first; small, so that a deep model begins near the identity.

    Shape:
        `x` and `y`: `(..., D)`; `weight`: `(D,)`.

    Example:
        >>> LayerScale(2, 0.5)(mx.ones((1, 2)))
        array([[0.5, 0.5]], dtype=float32)
    """

    def __init__(self, dims: int, initial: float = 1e-5):
        super().__init__()
        check_sizes("LayerScale", dims=dims)
        self.weight = mx.full((dims,), initial)

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.weight.astype(x.dtype)


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
        linear: LinearFactory = Linear,
    ):
        super().__init__()
        check_sizes(
            "Convolution",
            dims=dims,
            output_dims=output_dims,
            kernel_size=kernel_size,
            stride=stride,
        )
        if padding is None:
            padding = kernel_size // 2 if kernel_size != stride else 0
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
                f"[Convolution] 'x' must be at least {side - 2 * pad} positions high and wide but got "
                f"shape {x.shape}."
            )
        if pad:
            x = mx.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
        windows = gather_windows(x, side, self._stride)
        if "norm" in self:
            return self.norm.of_linear(self.linear, windows)
        y: mx.array = self.linear(windows).astype(x.dtype)
        return y


def gather_windows(x: mx.array, side: int, stride: int) -> mx.array:
    """The contents of each window, row by row.

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
        partial(_concatenated_slices, side=side, stride=stride),
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


def _concatenated_slices(x: mx.array, *, side: int, stride: int) -> mx.array:
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
    """Makes projections of positions that published files store as 1 x 1 convolutions."""
    return partial(Convolution, kernel_size=1, linear=linear)


class DepthwiseConvolution(nn.Module):
    r"""Convolution of each channel with a window of its own, around every position or every `s`-th.

    .. math::
        y_{i,j,c} = b_c + \sum_{u,v} w_{c,u,v}\,
        x_{s i+u-\lfloor k/2 \rfloor,\,s j+v-\lfloor k/2 \rfloor,\,c}

    with zeros beyond the map.

    Args:
        dims: Channels `D`.
        kernel_size: Side `k` of the window, an odd number.
        stride: Step `s` from window to window.
        bias: Whether there is `b`.
        norm: Of the result; part of the layer, so that both are one convolution in evaluation.

    Shape:
        `x`: `(B, H, W, D)`; `y`: `(B, H / s, W / s, D)`, rounded up; `weight`: `(D, k, k, 1)`.

    Raises:
        ValueError: The window has no position in its middle.

    Example:
        >>> DepthwiseConvolution(8, 3)(mx.zeros((1, 5, 4, 8))).shape
        (1, 5, 4, 8)
    """

    def __init__(
        self,
        dims: int,
        kernel_size: int,
        *,
        stride: int = 1,
        bias: bool = True,
        norm: BatchNorm | None = None,
    ):
        super().__init__()
        check_sizes("DepthwiseConvolution", dims=dims, kernel_size=kernel_size, stride=stride)
        if kernel_size % 2 == 0:
            raise ValueError(
                f"[DepthwiseConvolution] 'kernel_size' must be odd but got {kernel_size}."
            )
        self._stride = stride
        bound = 1.0 / math.sqrt(kernel_size * kernel_size)
        self.weight = mx.random.uniform(-bound, bound, (dims, kernel_size, kernel_size, 1))
        if bias:
            self.bias = mx.zeros((dims,))
        if norm is not None:
            self.norm = norm

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        dims, side = self.weight.shape[:2]
        return {"weight": StoredLayout.reshaped((dims, 1, side, side), self.weight.shape)}

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self.weight, self.get("bias")
        is_fused = "norm" in self and not self.norm.counts
        if is_fused:
            scale, shift = self.norm.scale_and_shift()
            weight = weight * scale[:, None, None, None]
            bias = shift if bias is None else bias * scale + shift
        y = depthwise_convolution(x, weight, bias, stride=self._stride)
        return self.norm(y) if "norm" in self and not is_fused else y


class DepthwiseBlock(nn.Module):
    r"""A depthwise convolution mixes positions, and a channel mixer the channels of each, in one branch.

    .. math::
        y = x + \mathrm{drop}\big(\gamma \odot
        \mathrm{ChannelMixer}(\mathrm{norm}(\mathrm{dwconv}(x)))\big)

    Args:
        convolution: Mixes the positions of each channel; a batch norm belongs to it.
        channel_mixer: Mixes within a position.
        norm: Any other norm; `None`: there is none.
        scale: The factors :math:`\gamma`; `None`: there are none.
        drop_path: Probability that training leaves the branch out for a sample.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Parameters:
        Of the parts `convolution`, `norm`, `channel_mixer` and `channel_scale`.
    """

    def __init__(
        self,
        convolution: DepthwiseConvolution,
        channel_mixer: nn.Module,
        *,
        norm: nn.Module | None = None,
        scale: LayerScale | None = None,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.convolution = convolution
        self.norm = nn.Identity() if norm is None else norm
        self.channel_mixer = channel_mixer
        self.channel_scale = nn.Identity() if scale is None else scale
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.channel_mixer(self.norm(self.convolution(x)))
        return x + self.drop_path(self.channel_scale(y)).astype(x.dtype)
