"""GeGLU feed-forward (Shazeer, arXiv 2002.05202)."""

from .gated_linear_unit import GatedLinearUnit


class GeGLU(GatedLinearUnit):
    r"""Gated feed-forward with the exact GELU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{gelu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Source: Shazeer, arXiv 2002.05202.

    Args: as `GatedLinearUnit`.

    Shape: as `GatedLinearUnit`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> GeGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    activation = "gelu"
