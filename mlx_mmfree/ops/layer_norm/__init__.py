"""The norm by mean and variance (Ba, Kiros and Hinton, arXiv 1607.06450)."""

import mlx.core as mx

from ..backend.dispatch import dispatch


def layer_norm(
    x: mx.array, weight: mx.array | None = None, bias: mx.array | None = None, *, eps: float
) -> mx.array:
    r"""Takes its mean from each row and divides it by the root of its variance.

    .. math::
        y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}}\,w + b

    Computed in float32.

    Source: Ba, Kiros and Hinton, arXiv 1607.06450.

    Args:
        x: `(..., D)`, any float dtype.
        weight: Scale, `(D,)`, any float dtype; `None` means ones.
        bias: Is added, `(D,)`, any float dtype; `None` means zeros.
        eps: Is added to the variance.

    Returns:
        `(..., D)` in the dtype of `x`.

    Raises:
        ValueError: The shapes do not agree, or `D` is zero.

    Example:
        >>> y = layer_norm(mx.array([1.0, 3.0]), bias=mx.array([10.0, 10.0]), eps=0.0)
        >>> [round(n, 4) for n in y.tolist()]
        [9.0, 11.0]
    """
    given = [array.shape for array in (weight, bias) if array is not None]
    if x.ndim < 1 or not x.shape[-1] or any(shape != x.shape[-1:] for shape in given):
        raise ValueError(
            "[layer_norm] 'x', 'weight' and 'bias' must have shapes (..., D), (D,) and (D,) with D > 0 "
            f"but got {', '.join(map(str, [x.shape, *given]))}."
        )
    if x.size == 0:
        return x
    y: mx.array = dispatch(__name__, x, weight, bias, eps=eps)
    return y
