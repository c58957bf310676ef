"""The linear layer of ternary training: a float matrix that is ternarised in each call."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple, get_args

import mlx.core as mx

from .backend.cost import Call, Cost, work
from .backend.dispatch import FLOATS, Example, Operation, native_kernel, use_any_backend
from .backend.gradient import with_reference_gradient
from .bit_linear import Projection, bit_linear
from .linear_product import linear_product
from .long_sums import long_sum
from .norms import rms_norm
from .rms_norm_quantize import Rounding, normed, rms_norm_quantize
from .ternary import MOST_CODES, scale_of_mean, straight_through, ternarize


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
    gradient equals the gradient of a linear layer whose input is :math:`q / s` and whose weight is
    :math:`t\,m`:

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
    y: mx.array = _operation(x, weight, norm, eps=eps, quantization=quantization)
    return y


def reference(
    x: mx.array,
    weight: mx.array,
    norm: mx.array | None,
    *,
    eps: float | None,
    quantization: Quantization,
) -> mx.array:
    """The definition, in terms of the other operations."""
    return _multiplied(x, weight, norm, eps, quantization, mx.float32)


def multiplied_on_gpu(
    x: mx.array,
    weight: mx.array,
    norm: mx.array | None,
    *,
    eps: float | None,
    quantization: Quantization,
) -> mx.array:
    """The definition with bfloat16 as it is.

    bfloat16 holds codes and trits exactly, and a GPU sums in float32.
    """
    dtype = mx.bfloat16 if x.dtype == mx.bfloat16 else mx.float32
    return _multiplied(x, weight, norm, eps, quantization, dtype)


def _multiplied(
    x: mx.array,
    weight: mx.array,
    norm: mx.array | None,
    eps: float | None,
    quantization: Quantization,
    dtype: mx.Dtype,
) -> mx.array:
    """The result, whose product is computed in `dtype`."""
    rounding, has_codes, strength = quantization
    trits, scale = ternarize(mx.stop_gradient(weight))
    floats = weight.astype(mx.float32) * (1.0 / scale)
    if has_codes:
        values, input_scale = rms_norm_quantize(x, norm, eps=eps, rounding=rounding)
        input_scale = mx.stop_gradient(input_scale)
        scale = scale / input_scale
    else:
        values = normed(x, norm, eps)
    if strength < 1:
        trits = floats + strength * (trits - floats)
        if has_codes:
            scaled = normed(x, norm, eps) * input_scale
            values = straight_through(scaled + strength * (values - scaled), scaled)
    trits = straight_through(trits, floats)
    return (linear_product(values.astype(dtype), trits.astype(dtype)) * scale).astype(x.dtype)


def _native(
    x: mx.array,
    weight: mx.array,
    norm: mx.array | None,
    *,
    eps: float | None,
    quantization: Quantization,
) -> mx.array:
    """C++, whose product is one of 8-bit codes and packed trits.

    It takes between a quarter and half of the time of a product of floats. For the gradient, the input
    and the packed trits are stored, but neither codes nor trits as floats.
    """
    is_whole = quantization.activations and quantization.strength == 1
    if not is_whole or x.dtype not in FLOATS or weight.dtype not in FLOATS:
        return reference(x, weight, norm, eps=eps, quantization=quantization)
    if eps is not None and norm is None:
        norm = mx.ones(x.shape[-1:])
    packed, scale = _packed(mx.stop_gradient(weight))
    y: mx.array = _function(eps, quantization)(
        x, weight, packed, scale, *([] if norm is None else [norm])
    )
    return y


def _packed(weight: mx.array) -> tuple[mx.array, mx.array]:
    """The matrix and scale of `ternarize`, with the same bits, the matrix packed."""
    scale = scale_of_mean(long_sum(_size_sums()(weight)) / weight.size)
    return _pack_rounded()(weight, scale), scale


@cache
def _function(eps: float | None, quantization: Quantization) -> Callable[..., Any]:
    rounding = quantization.rounding

    def forward(
        x: mx.array, weight: mx.array, packed: mx.array, scale: mx.array, *norm: mx.array
    ) -> mx.array:
        return bit_linear(x, (Projection(packed, scale, *norm),), eps=eps, rounding=rounding)

    def definition(
        x: mx.array, weight: mx.array, packed: mx.array, scale: mx.array, *norm: mx.array
    ) -> mx.array:
        with use_any_backend():
            return reference(x, weight, *(norm or [None]), eps=eps, quantization=quantization)

    def backward(
        inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> tuple[mx.array, ...]:
        x, weight, packed, scale, *norm = inputs
        d_y = cotangents[0].astype(mx.float32)
        d_rounded = d_y @ _unpack_scaled()(packed, scale, weight.shape[1])
        own_norm = norm[0].astype(mx.float32) if norm else None
        rounded = _rms_norm_round()(x, own_norm, eps, rounding == "half_away")
        d_weight = d_y.reshape(-1, weight.shape[0]).T @ rounded.reshape(-1, weight.shape[1])
        d_inputs = [d_rounded]
        if eps is not None:
            given = [x.astype(mx.float32), *norm]
            d_inputs = mx.vjp(lambda x, norm: rms_norm(x, norm, eps=eps), given, [d_rounded])[1]
        d_x, *d_norm = (
            d.astype(array.dtype) for d, array in zip(d_inputs, [x, *norm], strict=True)
        )
        return d_x, d_weight.astype(weight.dtype), packed, mx.zeros_like(scale), *d_norm

    return with_reference_gradient(forward, definition, backward)


def _size_sums_cost(call: Call) -> Cost:
    count = call.inputs[0].size
    return Cost(work(add=count, other=count))


def _pack_rounded_cost(call: Call) -> Cost:
    """Weights over their scale, rounded and kept in bounds, are shifted into words."""
    count = call.inputs[0].size
    return Cost(work(other=3 * count, integer=2 * count))


def _examples() -> Iterator[Example]:
    # arrays of fewer than 8 numbers lie in another address space of Metal
    for dims, dtype, has_codes in product((32, 4), FLOATS, (True, False)):
        x, weight = mx.zeros((1, dims), dtype), mx.zeros((3, dims), dtype)
        quantization = Quantization(activations=has_codes)
        for norm, eps in ((None, None), (mx.ones((dims,), dtype), 1e-6)):
            yield Example((x, weight, norm), {"eps": eps, "quantization": quantization})


_size_sums = native_kernel("size_sums")
_pack_rounded = native_kernel("pack_rounded")
_unpack_scaled = native_kernel("unpack_scaled")
_rms_norm_round = native_kernel("rms_norm_round")
_operation = Operation(
    "ternary_linear",
    _examples,
    costs={"SizeSumsOf": _size_sums_cost, "PackRounded": _pack_rounded_cost},
    metal=multiplied_on_gpu,
    cuda=multiplied_on_gpu,
    native=_native,
    reference=reference,
)
