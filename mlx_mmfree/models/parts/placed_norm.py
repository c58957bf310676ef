"""RMSNorm with a gain for each place of a sequence."""

import mlx.core as mx
import mlx.nn as nn

from ...layers.arguments import check_features, check_sizes


class PlacedRMSNorm(nn.Module):
    r"""RMSNorm whose gain depends on the place in the sequence.

    .. math::
        y_{t,d} = \frac{x_{t,d}}{\sqrt{\mathrm{mean}_e\,x_{t,e}^2 + \epsilon}}\,g_{t,d}

    Keras-MML's norm has such a gain wherever its input is a sequence. It is made for a longest
    sequence, and knows only whole ones: a model with it cannot go on from a state.

    Args:
        dims: Size `D` of the last axis.
        max_length: Places.
        eps: :math:`\epsilon`. By default as good as none, as in Keras-MML.

    Shape:
        `x` and `y`: `(..., L, D)`.

    Raises:
        ValueError: A sequence is longer than `max_length`.

    Example:
        >>> PlacedRMSNorm(8, max_length=5)(mx.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    def __init__(self, dims: int, *, max_length: int, eps: float = 1e-24):
        super().__init__()
        check_sizes("PlacedRMSNorm", dims=dims, max_length=max_length)
        self.eps = eps
        self.weight = mx.ones((max_length, dims))

    def __call__(self, x: mx.array) -> mx.array:
        max_length, dims = self.weight.shape
        check_features("PlacedRMSNorm", x, dims)
        length = x.shape[-2] if x.ndim > 1 else 0
        if not 0 < length <= max_length:
            raise ValueError(
                f"[PlacedRMSNorm] 'x' must be a sequence of 1 to {max_length} places but got shape "
                f"{x.shape}."
            )
        return mx.fast.rms_norm(x, None, self.eps) * self.weight[:length].astype(x.dtype)
