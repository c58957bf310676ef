"""Rectangular windows of a map."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np


class MapWindows(NamedTuple):
    """How a map is cut into windows.

    Attributes:
        height: Rows of the map.
        width: Columns of the map.
        sides: Rows and columns of a window.
        shift: By how many rows and columns the windows lie behind the map's upper left corner.
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

    def joined(self, windows: mx.array) -> mx.array:
        """The map of windows, the way back of `cut`."""
        (rows, columns), (high, wide) = self.counts, self.sides
        parts = windows.reshape(-1, rows, columns, high, wide, windows.shape[-1])
        x = parts.swapaxes(2, 3).reshape(-1, rows * high, columns * wide, windows.shape[-1])
        if self.pads_first:
            return self._shifted(x, 1)[:, : self.height, : self.width]
        return self._shifted(x[:, : self.height, : self.width], 1)

    def same_region(self) -> mx.array | None:
        """Which places of each window lay side by side before the shift, booleans `(N, h w, h w)`.

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
    """A number for each place along an axis, the same for those that stay neighbours."""
    place = np.arange(size)
    if not shift:
        return np.zeros_like(place)
    return (place >= size - side).astype(np.int64) + (place >= size - shift)
