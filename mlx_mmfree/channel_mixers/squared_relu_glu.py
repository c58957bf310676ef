"""Squared-ReLU gated feed-forward (So et al., arXiv 2109.08668), as in BitNet b1.58 2B4T."""

from .gated_linear_unit import GatedLinearUnit


class SquaredReLUGLU(GatedLinearUnit):
    r"""Gated feed-forward with the square of ReLU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{relu}(W_\mathrm{gate}\,x)^2 \odot W_\mathrm{up}\,x)

    The hidden values are float32: the squares of real models overflow float16.

    Source: the activation of So et al., arXiv 2109.08668, in the unit of BitNet b1.58 2B4T.

    Args: as `GatedLinearUnit`.

    Shape: as `GatedLinearUnit`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> SquaredReLUGLU(64, hidden_dims=128, norm_eps=1e-5)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    activation = "relu2"
