"""Product of activations and a packed ternary matrix, as in BitNet b1.58 (arXiv 2402.17764)."""

import mlx.core as mx

from ..backend.dispatch import dispatch
from ..ternary import MOST_CODES, packed_width


def ternary_matmul(x: mx.array, weight: mx.array, *, codes: bool = False) -> mx.array:
    r"""Multiplies by a packed ternary matrix.

    .. math::
        y = x\,T^\top

    With whole numbers for activations, such as the codes of `rms_norm_quantize`, every sum is an exact
    whole number, the same on every backend and for any number of rows, as long as `D <= 2 ** 24 / 128`.
    The caller multiplies the sums by the scale. The gradient is that of `x`.

    Source: BitNet b1.58 (Ma et al., arXiv 2402.17764).

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Packed trits, `uint32` of shape `(N, packed_width(D))`, see `ops.ternary`.
        codes: Whether the caller vouches that `x` holds whole numbers in [-128, 127], so that a backend
            may compute with 8-bit integers. A row with a NaN gives NaN. Results for other values are
            undefined.

    Returns:
        Sums as float32 of shape `(..., N)`.

    Raises:
        ValueError: The packed width does not belong to `D` inputs, a dtype is wrong, or `D` is above
            `2 ** 22` with `codes`.

    Example:
        >>> weight = pack_ternary(mx.array([[-1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))
        >>> ternary_matmul(mx.array([[5.0, 7.0, 9.0]]), weight).tolist()
        [[4.0, 12.0]]
    """
    if x.ndim < 1:
        raise ValueError("[ternary_matmul] 'x' must have shape (..., D) but got a single number.")
    if weight.dtype != mx.uint32 or weight.ndim != 2:
        raise ValueError(
            f"[ternary_matmul] 'weight' must be a uint32 matrix but got {weight.dtype} with shape "
            f"{weight.shape}."
        )
    width = packed_width(x.shape[-1])
    if weight.shape[1] != width:
        raise ValueError(
            f"[ternary_matmul] 'weight' must have {width} words a row for "
            f"{x.shape[-1]} inputs but got {weight.shape[1]}."
        )
    if codes and x.shape[-1] > MOST_CODES:
        raise ValueError(
            f"[ternary_matmul] 'x' must have {MOST_CODES} codes a row at most but got {x.shape[-1]}."
        )
    if x.size == 0 or weight.shape[0] == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]))
    result: mx.array = dispatch(__name__, x, weight, codes=codes)
    return result
