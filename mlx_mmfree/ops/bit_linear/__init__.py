"""Ternary projections with everything around them: gating, norms, quantisation, scales, residual."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..activations import Activation
from ..dispatch import dispatch
from ..rms_norm_quantize import Rounding
from ..ternary import packed_width


class Projection(NamedTuple):
    """One ternary matrix.

    Attributes:
        weight: Packed trits, `uint32` of shape `(N, packed_width(D))`.
        scale: float32, `(1,)` or one for each output, `(N,)`.
        norm: Scale of the projection's own RMSNorm, `(D,)`; `None` without one.
    """

    weight: mx.array
    scale: mx.array
    norm: mx.array | None = None


def bit_linear(
    x: mx.array,
    projections: Sequence[Projection],
    *,
    eps: float | None = None,
    rounding: Rounding = "half_even",
    quantize: bool = True,
    gate: Activation | None = None,
    norm: mx.array | None = None,
    norm_eps: float | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    r"""Projects by several ternary matrices that share one input.

    .. math::
        u = \begin{cases} a(x_{..D}) \odot x_{D..} & \text{with a gate} \\ x & \text{else} \end{cases},
        \quad z = \mathrm{RMSNorm}(u), \quad
        (q_p, s_p) = \mathrm{quantize}(\mathrm{RMSNorm}_p(z)), \quad
        y = \big[(q_p\,T_p^\top)\,m_p / s_p\big]_p + r

    Each norm is left out where its epsilon is `None`; `quantize` is that of `rms_norm_quantize`. The
    arithmetic is float32. A backend may compute one mean square of `z` for all projections.

    Args:
        x: `(..., D)`, or gate and up halves `(..., 2D)` with `gate`; any float dtype.
        projections: The matrices; all or none have a norm.
        eps: Epsilon of the projections' norms.
        rounding: Ties of the activation codes, as in `rms_norm_quantize`.
        quantize: `False` multiplies the float activations.
        gate: The activation of the gate half.
        norm: Scale of the norm of all of them, `(D,)`.
        norm_eps: Epsilon of that norm.
        residual: Added to the result, `(..., N)` with the sum of all outputs.

    Returns:
        The results, one behind the other in the last axis, in the dtype of `x`.

    Raises:
        ValueError: A matrix does not fit the input, or the norms do not agree with their epsilons.
    """
    dims = x.shape[-1] // 2 if gate else x.shape[-1]
    for projection in projections:
        weight = projection.weight
        if weight.dtype != mx.uint32 or weight.ndim != 2 or weight.shape[1] != packed_width(dims):
            raise ValueError(
                f"[bit_linear] 'projections' must have weights of {packed_width(dims)} uint32 words a "
                f"row for {dims} inputs but got {weight.dtype} with shape {weight.shape}."
            )
        if (projection.norm is None) != (eps is None):
            raise ValueError(
                "[bit_linear] 'projections' must have a norm if 'eps' is given, else none."
            )
    if (norm is None) != (norm_eps is None):
        raise ValueError("[bit_linear] 'norm' and 'norm_eps' must be given together.")
    result: mx.array = dispatch(
        __name__,
        x,
        tuple(projections),
        eps=eps,
        rounding=rounding,
        quantize=quantize,
        gate=gate,
        norm=norm,
        norm_eps=norm_eps,
        residual=residual,
    )
    return result
