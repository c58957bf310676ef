"""Gradient checkpointing: blocks whose inner values are recomputed in the backward pass."""

from typing import Any, cast

import mlx.core as mx

from ..layers.token_mixer import State
from ..models import Block, Decoder


class CheckpointedBlock(Block):
    """A `Block` that keeps only its inputs for the backward pass."""

    def __call__(
        self, x: mx.array, state: State = None, valid: mx.array | None = None, **context: Any
    ) -> tuple[mx.array, State]:
        high, low = cast(Any, mx.random.state)[0].tolist()

        def forward(
            parameters: dict[str, Any], x: mx.array, state: State, context: dict[str, Any]
        ) -> tuple[mx.array, State]:
            # the backward pass drops what the forward pass dropped
            mx.random.seed(high << 32 | low)
            self.update(parameters)
            return Block.__call__(self, x, state, valid, **context)

        # Parameters and context are arguments so that the gradient reaches them.
        result: tuple[mx.array, State] = mx.checkpoint(forward)(
            self.trainable_parameters(), x, state, context
        )
        return result


def checkpoint_blocks(model: Decoder) -> None:
    """Turns on gradient checkpointing for every block of `model`."""
    for block in model.blocks:
        block.__class__ = CheckpointedBlock
