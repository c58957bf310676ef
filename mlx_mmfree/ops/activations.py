"""The activations of gated units, by name."""

from collections.abc import Callable
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

Activation = Literal["silu", "relu2", "gelu", "relu"]


def squared_relu(x: mx.array) -> mx.array:
    """The square of `max(x, 0)`, in float32 because squares of float16 overflow."""
    return nn.relu(x.astype(mx.float32)).square()


ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "relu2": squared_relu,
    "gelu": nn.gelu,
    "relu": nn.relu,
}
