"""Maps of another size, by bicubic interpolation with antialiasing."""

from functools import lru_cache

import mlx.core as mx
import numpy as np

_SHARPNESS = -0.5


def resized(x: mx.array, size: tuple[int, int]) -> mx.array:
    r"""A map with other numbers of rows and columns, as PyTorch and Pillow compute it.

    .. math::
        y_i = \sum_j w_{ij} x_j, \quad
        w_{ij} \propto k\Big(\frac{j + 0.5 - s\,(i + 0.5)}{\max(s, 1)}\Big), \quad \sum_j w_{ij} = 1

    along each axis, with the old size over the new one, `s`, and Keys' kernel `k` for :math:`a = -0.5`
    (IEEE Trans. ASSP 29, 1981).

    Args:
        x: `(B, H, W, D)`.
        size: Height and width of the result.

    Returns:
        `(B, height, width, D)`, in the dtype of `x`; computed in float32.

    Example:
        >>> resized(mx.ones((1, 4, 4, 2)), (6, 3)).shape
        (1, 6, 3, 2)
    """
    rows, columns = (
        mx.array(_weights(old, new)) for old, new in zip(x.shape[1:3], size, strict=True)
    )
    y = mx.einsum("ih,jw,bhwd->bijd", rows, columns, x.astype(mx.float32))
    return y.astype(x.dtype)


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> np.ndarray:
    """Those of an axis, float32 `(new, old)`."""
    scale = old / new
    centers = scale * (np.arange(new)[:, None] + 0.5)
    weights = _kernel((np.arange(old) + 0.5 - centers) / max(scale, 1.0))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _kernel(distance: np.ndarray) -> np.ndarray:
    x, a = np.abs(distance), _SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
