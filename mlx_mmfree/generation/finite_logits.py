"""Logits are checked for NaN, infinity and overflow."""

from typing import cast

import mlx.core as mx

from ..errors import NumericalError
from ..ops import long_sum


def are_finite(logits: mx.array) -> mx.array:
    """Returns whether no logit of a row is infinite or NaN and not all are zero: booleans `(...)`, not
    computed.

    A norm turns numbers whose squares overflow into zeros, which is why zeros are refused too. Each
    row's sum of magnitudes tells both in one pass, which costs next to nothing beside a decoding step.
    """
    sums = long_sum(mx.abs(logits), axis=-1)
    return mx.logical_and(sums > 0, sums < mx.inf)


def check_finite(finite: mx.array) -> None:
    """Raises `NumericalError` unless all that `are_finite` found was finite."""
    if not all(cast(list[bool], finite.tolist())):
        raise not_finite()


def not_finite() -> NumericalError:
    """The error where logits are not finite."""
    return NumericalError(
        "[model] the model's logits must be finite but hold NaN or infinity, or are all zero "
        "because a number before them overflowed. The weights, the adapter or the prompt cache are "
        "damaged, or the float type is too small: try '--dtype float32'."
    )
