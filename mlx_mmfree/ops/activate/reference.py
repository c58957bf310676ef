"""Definition of `activate` in plain operations."""

import mlx.core as mx

from ..activations import ACTIVATIONS, Activation


def run(x: mx.array, activation: Activation) -> mx.array:
    return ACTIVATIONS[activation](x)
