"""Stops a model whose logits say nothing, before its text is taken for a result."""

import mlx.core as mx

from ..errors import NumericalError


def are_finite(logits: mx.array) -> mx.array:
    """Whether no logit is infinite or NaN and no row all zero: a boolean `()`, yet to be computed.

    A norm turns numbers whose squares overflow into zeros, which is why zeros are refused too. Each
    row's sum of magnitudes tells both in one pass, which costs next to nothing beside a decoding step.
    """
    # 16 bits cannot hold the sum of a vocabulary
    sums = mx.abs(logits.astype(mx.float32)).sum(axis=-1)
    return mx.logical_and(sums > 0, sums < mx.inf).all()


def check_finite(finite: bool) -> None:
    """Raises `NumericalError` unless the numbers of a model were finite."""
    if not finite:
        raise NumericalError(
            "[model] the model's logits must be finite but hold NaN or infinity, or are all zero "
            "because a number before them overflowed. The weights, the adapter or the prompt cache are "
            "damaged, or the float type is too small: try '--dtype float32'."
        )
