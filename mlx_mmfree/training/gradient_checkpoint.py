"""Gradient checkpointing: blocks whose inner values are recomputed in the backward pass."""

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..layers.token_mixer import State
from ..models import Block
from ..models.parts.stack import Stack


def recomputed(
    block: Block, x: mx.array, state: State, valid: mx.array | None, **context: Any
) -> tuple[mx.array, State]:
    """Calls a block so that only its inputs are kept for the backward pass.

    A block is recomputed when the gradient of its result is there, and all its gradients are computed
    before the block before it is. With `mx.checkpoint`, a gradient that all blocks share, as that of
    lower bounds, is put off to the end and holds on to what each block recomputed.
    """
    high, low = cast(Any, mx.random.state)[0].tolist()
    parameters = block.trainable_parameters()

    def forward(
        parameters: dict[str, Any], x: mx.array, state: State, context: dict[str, Any]
    ) -> tuple[mx.array, State]:
        # the backward pass drops what the forward pass dropped
        mx.random.seed(high << 32 | low)
        block.update(parameters)
        return block(x, state, valid, **context)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        given = _flat(cotangents)
        waiting: Any = mx.depends(_flat(primals), given)
        _, gradients = mx.vjp(lambda *a: _flat(forward(*_like(primals, a))), waiting, given)
        block.update(parameters)
        return _like(primals, mx.depends(gradients, gradients))

    # Parameters and context are arguments so that the gradient reaches them.
    checkpointed: Any = mx.custom_function(forward)
    checkpointed.vjp(backward)
    result: tuple[mx.array, State] = checkpointed(parameters, x, state, context)
    block.update(parameters)
    return result


def checkpoint_blocks(model: Stack) -> None:
    """Turns on gradient checkpointing for every block of `model`."""
    model.run_block = recomputed


def _flat(tree: Any) -> list[Any]:
    return [array for _, array in cast(Any, tree_flatten(tree))]


def _like(tree: Any, arrays: Any) -> Any:
    """The arrays in the structure of a tree."""
    following = iter(arrays)
    return tree_map(lambda _: next(following), tree)
