"""Definition of `bit_linear`, in terms of the other operations."""

import mlx.core as mx

from ..gated_activation import gated
from ..rms_norm_quantize import rms_norm_quantize
from ..ternary_matmul import ternary_matmul
from . import Options, Projection


def shared_input(x: mx.array, options: Options) -> mx.array:
    """What all projections get: the input after its gate and norm, float32."""
    z = x.astype(mx.float32)
    if options.gate is not None:
        z = gated(z, options.gate)
    if options.norm is not None and options.norm_eps is not None:
        z = mx.fast.rms_norm(z, options.norm.astype(mx.float32), options.norm_eps)
    return z


def run(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    eps, rounding, quantize, *_, residual = options
    z = shared_input(x, options)
    results = []
    codes: mx.array | None = None
    for weight, scale, own_norm in projections:
        if quantize:
            # without norms of their own all projections share their codes
            if codes is None or own_norm is not None:
                codes, input_scale = rms_norm_quantize(z, own_norm, eps=eps, rounding=rounding)
            results.append(ternary_matmul(codes, weight, codes=True) * (scale / input_scale))
        else:
            normed = z
            if own_norm is not None and eps is not None:
                normed = mx.fast.rms_norm(z, own_norm.astype(mx.float32), eps)
            results.append(ternary_matmul(normed, weight) * scale)
    y = results[0] if len(results) == 1 else mx.concatenate(results, axis=-1)
    return (y if residual is None else y + residual).astype(x.dtype)
