"""RMS normalisation followed by 8-bit quantisation per token."""

from typing import Literal, get_args

import mlx.core as mx

from ..backend.dispatch import dispatch

Rounding = Literal["half_even", "half_away"]


def rms_norm_quantize(
    x: mx.array,
    weight: mx.array | None = None,
    *,
    eps: float | None = None,
    rounding: Rounding = "half_even",
) -> tuple[mx.array, mx.array]:
    r"""Quantises each token to 8-bit codes, after an RMSNorm if `eps` is given.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}\,w, \quad
        s = \frac{127}{\max(\max|y|, 10^{-5})}, \quad
        q = \mathrm{clip}(\mathrm{round}(y s), -128, 127)

    The gradient is straight-through, which is the gradient of `y * s` with `s` held constant. Sources:
    arXiv 2402.17764 eq. 4-5 (ties to even), and arXiv 2406.02528 sec. 3.2 with its released kernel (norm
    inside, ties away from zero).

    Args:
        x: Activations `(..., D)`, any float dtype; computed in float32.
        weight: Scale of the norm, `(D,)`. Only with `eps`.
        eps: Epsilon of the norm, or `None` for no norm.
        rounding: Where exact ties go: `"half_even"` to even, or `"half_away"` away from zero.

    Returns:
        The codes, whole numbers in float32 `(..., D)`, and `s`, float32 `(..., 1)`.

    Raises:
        ValueError: `rounding` is unknown, `weight` is given without `eps`, or `D` is zero.

    Example:
        >>> codes, scale = rms_norm_quantize(mx.array([0.5, -1.0, 0.25]))
        >>> codes.tolist(), scale.tolist()
        ([64.0, -127.0, 32.0], [127.0])
    """
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(
            f"[rms_norm_quantize] 'x' must have one value a row at least but got shape {x.shape}."
        )
    if rounding not in get_args(Rounding):
        raise ValueError(
            f"[rms_norm_quantize] 'rounding' must be one of {', '.join(get_args(Rounding))} but got "
            f"'{rounding}'."
        )
    if weight is not None and eps is None:
        raise ValueError("[rms_norm_quantize] 'eps' must be given with 'weight' but got None.")
    if x.size == 0:
        return mx.zeros(x.shape), mx.zeros((*x.shape[:-1], 1))
    codes, scale = dispatch(__name__, x, weight, eps=eps, rounding=rounding)
    return codes, scale
