"""An RMSNorm of a gate, times the swish of what it gates."""

import mlx.core as mx

from ..backend.dispatch import dispatch


def gated_rms_norm(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    r"""Multiplies a normed gate by the swish of its input.

    .. math::
        y = \frac{g}{\sqrt{\mathrm{mean}(g^2) + \epsilon}}\,w \odot \mathrm{silu}(h)

    Computed in float32. Source: the output gate of the released MLGRU (arXiv 2406.02528).

    Args:
        gate: `(..., D)`, any float dtype.
        h: What is gated, `(..., D)`, any float dtype.
        weight: Scale of the norm, `(D,)`.
        eps: Epsilon of the norm.

    Returns:
        `(..., D)` in the dtype of `gate`.

    Raises:
        ValueError: The shapes do not agree, or `D` is zero.

    Example:
        >>> y = gated_rms_norm(mx.array([1.0, 1.0]), mx.array([0.0, 2.0]), mx.ones(2), eps=0.0)
        >>> [round(n, 4) for n in y.tolist()]
        [0.0, 1.7616]
    """
    if gate.ndim < 1 or gate.shape != h.shape or weight.shape != gate.shape[-1:] or not weight.size:
        raise ValueError(
            "[gated_rms_norm] 'gate', 'h' and 'weight' must have shapes (..., D), (..., D) and (D,) "
            f"with D > 0 but got {gate.shape}, {h.shape} and {weight.shape}."
        )
    if gate.size == 0:
        return mx.zeros_like(gate)
    y: mx.array = dispatch(__name__, gate, h, weight, eps=eps)
    return y
