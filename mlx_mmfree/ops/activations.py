"""The activations by which gated units gate, by name."""

from collections.abc import Callable
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

Activation = Literal["silu", "relu2", "gelu", "relu"]


def squared_relu(x: mx.array) -> mx.array:
    """`max(x, 0)` squared, in float32: squares of float16 overflow."""
    return nn.relu(x.astype(mx.float32)).square()


ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "relu2": squared_relu,
    "gelu": nn.gelu,
    "relu": nn.relu,
}


def gated(x: mx.array, activation: Activation) -> mx.array:
    """`a(g) * u` of the halves `g`, `u` of the last axis."""
    gate, up = mx.split(x, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up
