"""Stops a model whose logits are not finite, before its text is taken for a result."""

import mlx.core as mx

from ..errors import NumericalError


def are_finite(logits: mx.array) -> mx.array:
    """Whether no logit is infinite or NaN: a boolean `()`, yet to be computed."""
    return mx.isfinite(logits).all()


def check_finite(finite: bool) -> None:
    """Raises `NumericalError` unless the numbers of a model were finite."""
    if not finite:
        raise NumericalError(
            "[generate] the model's logits must be finite but hold NaN or infinity. The weights, the "
            "adapter or the prompt cache are damaged, or the float type is too small: try '--dtype "
            "float32'."
        )
