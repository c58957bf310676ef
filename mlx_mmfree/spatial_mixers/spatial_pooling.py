"""The mean around each position, the mixer of PoolFormer (Yu et al., arXiv 2111.11418)."""

from typing import ClassVar

import mlx.core as mx
import numpy as np

from ..layers.arguments import check_sizes
from ..layers.dense import Linear
from ..layers.mixer import Linears, SpatialMixer


class SpatialPooling(SpatialMixer):
    r"""The mean of a window less the position itself, since a block adds that again.

    .. math::
        y_p = \frac{1}{|N(p)|} \sum_{r \in N(p)} x_r - x_p

    with the positions :math:`N(p)` of the window that lie within the map.

    Source: Yu et al., arXiv 2111.11418.

    Args:
        dims: Dims `D`.
        window: Side of the window, an odd number.
        linear: Not used, since there are no projections.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The window has no position in its middle.

    Example:
        >>> SpatialPooling(32)(mx.zeros((1, 5, 4, 32))).shape
        (1, 5, 4, 32)
    """

    equation: ClassVar[str] = "y_p = mean of the x_r around p - x_p"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "arXiv 2111.11418"

    def __init__(self, dims: int, *, window: int = 3, linear: Linears = Linear):
        super().__init__()
        check_sizes("SpatialPooling", dims=dims, window=window)
        if window % 2 == 0:
            raise ValueError(f"[SpatialPooling] 'window' must be odd but got {window}.")
        self._dims = dims
        self._window = window

    def mix(self, x: mx.array) -> mx.array:
        total = self._summed(self._summed(x.astype(mx.float32), 1), 2)
        rows, columns = (self._counts(size) for size in x.shape[1:3])
        mean = total / mx.array(rows[:, None] * columns)[..., None]
        return (mean - x.astype(mx.float32)).astype(x.dtype)

    def _summed(self, x: mx.array, axis: int) -> mx.array:
        """The sums of neighbours along an axis."""
        reach, size = self._window // 2, x.shape[axis]
        around = mx.pad(x, [(reach, reach) if n == axis else (0, 0) for n in range(x.ndim)])
        total = mx.zeros_like(x)
        for step in range(self._window):
            near = slice(step, step + size)
            total = total + (around[:, near] if axis == 1 else around[:, :, near])
        return total

    def _counts(self, size: int) -> np.ndarray:
        """How many neighbours along an axis lie within the map."""
        position, reach = np.arange(size), self._window // 2
        low, high = np.maximum(position - reach, 0), np.minimum(position + reach, size - 1)
        return (high - low + 1).astype(np.float32)
