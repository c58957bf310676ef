"""Codes of the places of a map (EdgeNeXt, arXiv 2206.10589)."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..arguments import check_sizes
from ..stored_layout import StoredLayout


class FourierPositions(nn.Module):
    r"""Adds a linear map of sines and cosines of the row and the column.

    .. math::
        y_{ij} &= x_{ij} + W\,\Big[\phi\Big(2 \pi\,\frac{i + 1}{H + \epsilon}\Big) \,\Big|\,
        \phi\Big(2 \pi\,\frac{j + 1}{W + \epsilon}\Big)\Big] + b \\
        \phi(a)_{2n} &= \sin(a\,\theta^{-2n/F}), \; \phi(a)_{2n+1} = \cos(a\,\theta^{-2n/F})

    with :math:`\theta` = 10,000 and :math:`\epsilon = 10^{-6}`.

    Args:
        dims: Dims `D` of a map.
        num_features: Numbers `F` for each axis, an even number.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Raises:
        ValueError: The number of features is odd.

    Example:
        >>> FourierPositions(8)(mx.zeros((1, 5, 4, 8))).shape
        (1, 5, 4, 8)
    """

    def __init__(self, dims: int, *, num_features: int = 32):
        super().__init__()
        check_sizes("FourierPositions", dims=dims, num_features=num_features)
        if num_features % 2:
            raise ValueError(
                f"[FourierPositions] 'num_features' must be even but got {num_features}."
            )
        self._features = num_features
        self._dims = dims
        self.token_proj = nn.Linear(2 * num_features, dims)

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        layout = StoredLayout.convolution(self._dims, 2 * self._features, 1)
        return {"token_proj.weight": layout}

    def __call__(self, x: mx.array) -> mx.array:
        height, width = x.shape[1:3]
        rows = np.broadcast_to(self._codes(height)[:, None], (height, width, self._features))
        columns = np.broadcast_to(self._codes(width)[None], (height, width, self._features))
        codes = mx.array(np.concatenate([rows, columns], axis=-1).astype(np.float32))
        return x + self.token_proj(codes.astype(x.dtype))

    def _codes(self, count: int) -> np.ndarray:
        """Those of an axis, `(count, F)`; in float64, since angles are large."""
        place = np.arange(1, count + 1) / (count + 1e-6) * 2 * math.pi
        wave = 10000.0 ** (-2 * (np.arange(self._features) // 2) / self._features)
        angles = place[:, None] * wave
        even = np.arange(self._features) % 2 == 0
        return np.where(even, np.sin(angles), np.cos(angles))
