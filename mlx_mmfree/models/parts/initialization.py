"""Fresh weights."""

from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from ...layers.matrix import matrix_of

Model = TypeVar("Model", bound=nn.Module)


def draw_weights(model: Model, standard_deviation: float) -> Model:
    """Draws the weights of embeddings and linears from a normal distribution; returns the model."""

    def draw(_: str, module: nn.Module) -> None:
        matrix = matrix_of(module)
        if matrix is not None and matrix.storage == "floats":
            module.weight = mx.random.normal(module.weight.shape, scale=standard_deviation)

    model.apply_to_modules(draw)
    return model
