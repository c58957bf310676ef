"""The plain feed-forward."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import FeedForward
from tests.tolerances import TOLERANCE, relative_error

FUNCTIONS = {"relu": nn.relu, "gelu": nn.gelu, "gelu_tanh": nn.gelu_approx, "silu": nn.silu}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(("activation", "function"), FUNCTIONS.items(), ids=FUNCTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_formula(activation: Any, function: Any, bias: bool) -> None:
    mixer = FeedForward(6, hidden_dims=10, activation=activation, bias=bias)
    x = mx.random.normal((2, 3, 6))
    assert ("bias" in mixer.up_proj) == bias
    want = mixer.down_proj(function(mixer.up_proj(x)))
    assert relative_error(mixer(x), want) <= TOLERANCE[mx.float32]


def test_unknown_activation() -> None:
    known = "relu, gelu, gelu_tanh, silu"
    with pytest.raises(ValueError, match=f"'activation' must be one of {known} but got 'tanh'"):
        FeedForward(6, activation="tanh")  # type: ignore[arg-type]
