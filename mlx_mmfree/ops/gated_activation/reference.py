"""Definition of `gated_activation` in plain operations."""

import mlx.core as mx

from ..activations import ACTIVATIONS, Activation


def run(gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
    return ACTIVATIONS[activation](gate) * up
