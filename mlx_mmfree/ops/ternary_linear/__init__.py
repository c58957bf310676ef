"""The linear layer of ternary training: a float matrix that is ternarised in each call."""

from typing import NamedTuple, get_args

import mlx.core as mx

from ..backend.dispatch import dispatch
from ..rms_norm_quantize import Rounding
from ..ternary import MOST_CODES


class Quantization(NamedTuple):
    """How much of the layer is quantised.

    Attributes:
        rounding: Where exact ties of activation codes go, as in `rms_norm_quantize`.
        activations: Whether activations are quantised to 8 bits. Otherwise floats are multiplied.
        strength: The share of the rounding of weights and activations that is applied, from 0 to 1.

    Example:
        >>> x, weight = mx.array([[0.3, -0.8]]), mx.array([[0.25, 1.0]])
        >>> off = Quantization(strength=0.0)
        >>> round(ternary_linear(x, weight, quantization=off).item(), 4)
        -0.725
    """

    rounding: Rounding = "half_even"
    activations: bool = True
    strength: float = 1.0


WHOLE = Quantization()


def ternary_linear(
    x: mx.array,
    weight: mx.array,
    norm: mx.array | None = None,
    *,
    eps: float | None = None,
    quantization: Quantization = WHOLE,
) -> mx.array:
    r"""Multiplies quantised activations by a matrix that is made ternary.

    .. math::
        (q, s) = \mathrm{quantize}(\mathrm{RMSNorm}(x)), \quad (t, m) = \mathrm{ternarize}(W), \quad
        y = (q\,t^\top)\,m / s

    with `rms_norm_quantize` and `ops.ternarize`. Both quantisers are straight-through, so that the
    gradient is that of a linear layer whose input is :math:`q / s` and whose weight is :math:`t\,m`:

    .. math::
        \mathrm{d}W = \mathrm{d}y^\top (q / s), \quad \mathrm{d}\,\mathrm{RMSNorm}(x) =
        \mathrm{d}y\,(t\,m)

    Computed in float32; with bfloat16 activations, a GPU multiplies codes and trits in bfloat16, which
    holds them exactly. Source: BitNet b1.58 (arXiv 2402.17764).

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Floats `(N, D)`.
        norm: Scale of the norm, `(D,)`. Only with `eps`.
        eps: Epsilon of the norm, or `None` for no norm.
        quantization: How much is quantised. By default everything is.

    Returns:
        `(..., N)` in the dtype of `x`.

    Raises:
        ValueError: A shape, a dtype or the rounding does not fit.

    Example:
        >>> x, weight = mx.array([[2.0, -2.0]]), mx.array([[0.5, -1.0]])
        >>> round(ternary_linear(x, weight).item(), 4)
        3.0
    """
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1:] != x.shape[-1:] or not x.shape[-1]:
        raise ValueError(
            "[ternary_linear] 'x' and 'weight' must have shapes (..., D) and (N, D) with D > 0 but got "
            f"{x.shape} and {weight.shape}."
        )
    if norm is not None and (eps is None or norm.shape != x.shape[-1:]):
        raise ValueError(
            f"[ternary_linear] 'norm' must have shape {x.shape[-1:]} and come with 'eps' but got "
            f"{norm.shape} and {eps}."
        )
    if quantization.rounding not in get_args(Rounding):
        raise ValueError(
            f"[ternary_linear] 'rounding' must be one of {', '.join(get_args(Rounding))} but got "
            f"{quantization.rounding!r:.40}."
        )
    if quantization.activations and x.shape[-1] > MOST_CODES:
        raise ValueError(
            f"[ternary_linear] 'x' must have {MOST_CODES} codes a row at most but got {x.shape[-1]}."
        )
    if x.size == 0 or weight.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
    y: mx.array = dispatch(__name__, x, weight, norm, eps=eps, quantization=quantization)
    return y
