"""Attention within windows of a map, the mixer of Swin (Liu et al., arXiv 2103.14030)."""

from typing import ClassVar, NamedTuple

import mlx.core as mx
import numpy as np

from ..layers.arguments import check_counts, check_sizes, dims_of_a_head
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import Linears, SpatialMixer, check_map
from ..ops import attention


class MapWindows(NamedTuple):
    """How a map is cut into windows.

    Attributes:
        height: Rows of the map.
        width: Columns of the map.
        sides: Rows and columns of a window.
        shift: By how many rows and columns the windows are shifted from the map's upper left corner.
        pads_first: The map is padded before it is shifted, not after.
    """

    height: int
    width: int
    sides: tuple[int, int]
    shift: tuple[int, int]
    pads_first: bool

    @classmethod
    def of(
        cls,
        height: int,
        width: int,
        most: tuple[int, int],
        shift: int,
        pads_first: bool = True,
    ) -> "MapWindows":
        """Windows of at most so many rows and columns; along an axis with one, nothing is shifted."""
        sides = min(most[0], height), min(most[1], width)
        shifts = (shift if height > most[0] else 0, shift if width > most[1] else 0)
        return cls(height, width, sides, shifts, pads_first)

    @property
    def counts(self) -> tuple[int, int]:
        """Windows along each axis."""
        return -(-self.height // self.sides[0]), -(-self.width // self.sides[1])

    def cut(self, x: mx.array) -> mx.array:
        """The windows of `(B, H, W, D)`, the ones of a map side by side: `(B N, h w, D)`."""
        x = self._padded(x) if self.pads_first else x
        x = self._padded(self._shifted(x, -1))
        rows, columns = self.counts
        parts = x.reshape(-1, rows, self.sides[0], columns, self.sides[1], x.shape[-1])
        return parts.swapaxes(2, 3).reshape(-1, self.sides[0] * self.sides[1], x.shape[-1])

    def merged(self, windows: mx.array) -> mx.array:
        """The map of windows, the way back of `cut`."""
        (rows, columns), (high, wide) = self.counts, self.sides
        parts = windows.reshape(-1, rows, columns, high, wide, windows.shape[-1])
        x = parts.swapaxes(2, 3).reshape(-1, rows * high, columns * wide, windows.shape[-1])
        if self.pads_first:
            return self._shifted(x, 1)[:, : self.height, : self.width]
        return self._shifted(x[:, : self.height, : self.width], 1)

    def same_region(self) -> mx.array | None:
        """Which positions of each window lay side by side before the shift, booleans `(N, h w, h w)`.

        `None`: all of each window did.
        """
        if not any(self.shift):
            return None
        height, width = (n * side for n, side in zip(self.counts, self.sides, strict=True))
        down, right = (
            3 * _region(height, self.sides[0], self.shift[0]),
            _region(width, self.sides[1], self.shift[1]),
        )
        whole = MapWindows(height, width, self.sides, (0, 0), True)
        regions = whole.cut(mx.array(down[:, None] + right)[None, ..., None])
        return regions == regions.swapaxes(1, 2)

    def _padded(self, x: mx.array) -> mx.array:
        """A map, or one that is padded already, with whole windows."""
        missing = [-x.shape[axis] % side for axis, side in zip((1, 2), self.sides, strict=True)]
        if not any(missing):
            return x
        return mx.pad(x, [(0, 0), (0, missing[0]), (0, missing[1]), (0, 0)])

    def _shifted(self, x: mx.array, sign: int) -> mx.array:
        for axis, shift in zip((1, 2), self.shift, strict=True):
            if shift:
                x = mx.roll(x, sign * shift, axis)
        return x


def _region(size: int, side: int, shift: int) -> np.ndarray:
    """A number for each position along an axis, the same for those that stay neighbours."""
    position = np.arange(size)
    if not shift:
        return np.zeros_like(position)
    return (position >= size - side).astype(np.int64) + (position >= size - shift)


_PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class WindowAttention(SpatialMixer):
    r"""Softmax attention between the positions of a window, with a learned term for each offset.

    .. math::
        y_p = W_o\,\Big[\sum_{r \in N(p)} \mathrm{softmax}_r\big(q_{p,h}^\top k_{r,h} / \sqrt K
        + B_{p-r,h}\big)\,v_{r,h}\Big]_{h=1..H}

    Windows tile the map (W-MSA); with a shift of half a window in every second block, neighbours of
    one block lie in the same window in the next (SW-MSA). The shift is cyclic: positions that come from
    opposite edges share a window, but do not see each other. Along an axis that is not longer than a
    window there is one, which is not shifted. Where windows do not fit, the map is padded with zeros,
    which are seen like any other position.

    Source: Liu et al., arXiv 2103.14030.

    Args:
        dims: Dims `D`.
        window: Side `M` of a window; or rows and columns, where maps are never larger along one axis.
        shift: By how many positions windows are moved, less than `M`; 0: they are not.
        pads_first: A map is padded and then shifted, as in the original code and in transformers. timm
            shifts first, which differs where windows do not fit.
        num_heads: Heads `H`, of `K` dims.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_stacked: Queries, keys and values come from one projection, `qkv_proj`, in this order.
        bias: Whether queries, keys and values are projected with a bias; the output always is.

    Shape:
        `x` and `y`: `(B, H, W, D)`; `position_table`: `((2M - 1)^2, H)`, the row
        :math:`(\Delta y + M - 1)(2M - 1) + \Delta x + M - 1` for an offset.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The shift is not less than the window.

    Example:
        >>> WindowAttention(32, window=4, shift=2)(mx.zeros((1, 9, 6, 32))).shape
        (1, 9, 6, 32)
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d) + B) V, in windows"
    complexity: ClassVar[str] = "T M^2 D"
    paper: ClassVar[str] = "arXiv 2103.14030"

    def __init__(
        self,
        dims: int,
        *,
        window: int | tuple[int, int] = 7,
        shift: int = 0,
        pads_first: bool = True,
        num_heads: int = 8,
        linear: Linears = Linear,
        is_stacked: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        rows, columns = (window, window) if isinstance(window, int) else window
        for side in (rows, columns):
            check_sizes("WindowAttention", window=side)
        check_counts("WindowAttention", shift=shift)
        if shift >= max(rows, columns):
            raise ValueError(
                f"[WindowAttention] 'shift' must be less than the window, {window}, but got {shift}."
            )
        dims_of_a_head("WindowAttention", dims, num_heads)
        self._dims = dims
        self._window = (rows, columns)
        self._shift = shift
        self._pads_first = pads_first
        self.num_heads = num_heads
        inner = {"qkv_proj": [dims] * 3} if is_stacked else {name: [dims] for name in _PROJECTIONS}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(dims, dims, linear, bias=True)
        offsets = (2 * rows - 1) * (2 * columns - 1)
        self.position_table = mx.random.normal((offsets, num_heads)) * 0.02

    def __call__(self, x: mx.array) -> mx.array:
        check_map("WindowAttention", x, self._dims)
        windows = MapWindows.of(x.shape[1], x.shape[2], self._window, self._shift, self._pads_first)
        seen = windows.same_region()
        y = self.run(windows.cut(x), bias=self.position_bias(windows.sides), seen=seen)
        return windows.merged(y)

    def position_bias(self, sides: tuple[int, int]) -> mx.array:
        """The term of all pairs of positions of a window, `(H, h w, h w)`."""
        rows, columns = (axis.reshape(-1) for axis in np.indices(sides))
        down = rows[:, None] - rows + self._window[0] - 1
        right = columns[:, None] - columns + self._window[1] - 1
        index = mx.array(down * (2 * self._window[1] - 1) + right)
        return mx.moveaxis(self.position_table[index], -1, 0)

    def mix(
        self, q: mx.array, k: mx.array, v: mx.array, *, bias: mx.array, seen: mx.array | None
    ) -> mx.array:
        """Attention in windows `(B N, h w, D)`, of which positions see what `(N, h w, h w)` says."""
        q, k, v = (split_heads(part, self.num_heads) for part in (q, k, v))
        mask = None
        if seen is not None:
            mask = mx.tile(seen, (q.shape[0] // seen.shape[0], 1, 1))[:, None]
        return merge_heads(attention(q, k, v, mask, bias=bias[None]))
