"""The norm by the root of the mean square (Zhang and Sennrich, arXiv 1910.07467)."""

import mlx.core as mx

from ..backend.dispatch import dispatch


def rms_norm(x: mx.array, weight: mx.array | None = None, *, eps: float) -> mx.array:
    r"""Divides each row by the root of its mean square.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}\,w

    Computed in float32.

    Source: Zhang and Sennrich, arXiv 1910.07467.

    Args:
        x: `(..., D)`, any float dtype.
        weight: Scale, `(D,)`, any float dtype; `None` means ones.
        eps: Is added to the mean square.

    Returns:
        `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: The shapes do not agree, or `D` is zero.

    Example:
        >>> [round(n, 4) for n in rms_norm(mx.array([3.0, 4.0]), eps=0.0).tolist()]
        [0.8485, 1.1314]
    """
    if x.ndim < 1 or not x.shape[-1] or (weight is not None and weight.shape != x.shape[-1:]):
        raise ValueError(
            "[rms_norm] 'x' and 'weight' must have shapes (..., D) and (D,) with D > 0 but got "
            f"{x.shape} and {None if weight is None else weight.shape}."
        )
    if x.size == 0:
        return x
    y: mx.array = dispatch(__name__, x, weight, eps=eps)
    return y
