"""Definition of `gated_activation` in plain operations."""

import mlx.core as mx

from ..activations import ACTIVATIONS, Activation


def run(gate: mx.array, up: mx.array | None, activation: Activation) -> mx.array:
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up
