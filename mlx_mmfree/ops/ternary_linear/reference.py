"""Definition of `ternary_linear`, in terms of the other operations."""

import mlx.core as mx

from ..linear_product import linear_product
from ..rms_norm_quantize import rms_norm_quantize
from ..rms_norm_quantize.reference import normed
from ..straight_through import straight_through
from ..ternary import ternarize
from . import Quantization


def run(
    x: mx.array,
    weight: mx.array,
    norm: mx.array | None,
    *,
    eps: float | None,
    quantization: Quantization,
) -> mx.array:
    return multiplied(x, weight, norm, eps, quantization, mx.float32)


def multiplied(
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
