"""The arguments of `bit_linear`, and its definition in terms of the other operations."""

from typing import NamedTuple

import mlx.core as mx

from ..activations import Activation, gated
from ..rms_norm_quantize import Rounding, rms_norm_quantize
from ..ternary_matmul import ternary_matmul


class Projection(NamedTuple):
    """One ternary matrix.

    Attributes:
        weight: Packed trits, `uint32` of shape `(N, packed_width(D))`, see `ops.ternary`.
        scale: float32, `(1,)` or one for each output, `(N,)`.
        norm: Scale of the RMSNorm of this projection, `(D,)`, or `None` for no norm.

    Example:
        >>> weight, scale = ternarize_packed(mx.array([[0.5, -0.5], [0.0, 1.0]]))
        >>> bit_linear(mx.array([2.0, 4.0]), [Projection(weight, scale)], quantize=False).tolist()
        [-1.0, 2.0]
    """

    weight: mx.array
    scale: mx.array
    norm: mx.array | None = None


class Options(NamedTuple):
    """What `bit_linear` hands on to its backends beside the input and the projections."""

    eps: float | None = None
    rounding: Rounding = "half_even"
    quantize: bool = True
    gate: Activation | None = None
    norm: mx.array | None = None
    norm_eps: float | None = None
    residual: mx.array | None = None


def shared_input(x: mx.array, options: Options) -> mx.array:
    """What all projections get: the input after its gate and norm, float32."""
    z = x.astype(mx.float32)
    if options.gate is not None:
        z = gated(z, options.gate)
    if options.norm is not None and options.norm_eps is not None:
        z = mx.fast.rms_norm(z, options.norm.astype(mx.float32), options.norm_eps)
    return z


def reference(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    """The definition."""
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
