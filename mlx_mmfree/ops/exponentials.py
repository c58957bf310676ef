"""Exponentials of many numbers.

On a CPU, MLX computes exponentials one by one, which takes longer than all else for the logits of a
large vocabulary. `activate` has a kernel there for SiLU, of which they follow.
"""

import mlx.core as mx

from .activate import activate

_LOWEST = -80.0
"""Below it, weights are nearly too small for float32."""


def relative_weights(scores: mx.array) -> mx.array:
    r"""Weights in proportion to :math:`e^s`.

    .. math::
        e^{s-1} = \sigma / (1 - \sigma), \quad \sigma = \mathrm{silu}(s-1) / (s-1)

    Args:
        scores: Float32 of any shape, none above 0. Those below -80 weigh as much as -80, and minus
            infinity weighs nothing.

    Returns:
        float32 of the same shape.

    Example:
        >>> weights = relative_weights(mx.array([0.0, -1.0, -mx.inf]))
        >>> [round(w, 4) for w in (weights / weights[0]).tolist()]
        [1.0, 0.3679, 0.0]
    """
    shifted = mx.maximum(scores, _LOWEST) - 1
    sigmoid = activate(shifted, "silu") / shifted
    return mx.where(scores == -mx.inf, 0.0, sigmoid / (1 - sigmoid))
