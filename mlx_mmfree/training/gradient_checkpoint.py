"""Gradient checkpointing: the backward pass recomputes each block (arXiv 1604.06174)."""

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..layers.context import Context
from ..layers.mixer import State
from ..models import Block
from ..models.parts.stack import Stack
from .random_key import random_key, set_random_key


def recomputed(
    block: Block, x: mx.array, state: State, context: Context, **arguments: Any
) -> tuple[mx.array, State]:
    """Calls a block so that only its inputs are kept in memory for the backward pass.

    A block is recomputed once the gradient of its output is known, and all of its gradients are
    computed before the backward pass goes on to the block before it. `mx.checkpoint` does not ensure
    this: it puts off a gradient that all blocks share, such as that of the lower bounds, and so keeps
    what each block recomputed until the end.

    Args:
        block: The block.
        x: The input, `(B, L, D)`.
        state: The block's state, or `None` for an empty one.
        context: What the call shares with other blocks.
        arguments: Further arrays that the block takes by name.

    Returns:
        The output `(B, L, D)` and the new state.
    """
    key = random_key()
    parameters = block.trainable_parameters()

    def forward(
        parameters: dict[str, Any],
        x: mx.array,
        state: State,
        memory: dict[str, mx.array],
        handed: dict[str, mx.array],
        arguments: dict[str, Any],
    ) -> tuple[mx.array, State, dict[str, mx.array]]:
        # dropout must drop the same numbers in both passes
        set_random_key(key)
        block.update(parameters)
        own = context.with_memory(memory.get("memory"))
        own.handed = dict(handed)
        y, state = block(x, state, own, **arguments)
        return y, state, own.handed

    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        given = _flatten(cotangents)
        waiting: Any = mx.depends(_flatten(primals), given)
        _, gradients = mx.vjp(lambda *a: _flatten(forward(*_unflatten(primals, a))), waiting, given)
        block.update(parameters)
        return _unflatten(primals, mx.depends(gradients, gradients))

    # parameters, memory and what layers hand on are given to the function, so that they get gradients
    checkpointed: Any = mx.custom_function(forward)
    checkpointed.vjp(backward)
    memory = {} if context.memory is None else {"memory": context.memory}
    y, after, handed = checkpointed(parameters, x, state, memory, context.handed, arguments)
    context.handed.update(handed)
    block.update(parameters)
    return y, after


def checkpoint_blocks(model: Stack) -> None:
    """Turns on gradient checkpointing for every block of a model, those of its encoder too."""
    for _, module in model.named_modules():
        if isinstance(module, Stack):
            module.run_block = recomputed


def _flatten(tree: Any) -> list[Any]:
    return [array for _, array in cast(Any, tree_flatten(tree))]


def _unflatten(tree: Any, arrays: Any) -> Any:
    """Puts arrays into the structure of a tree."""
    following = iter(arrays)
    return tree_map(lambda _: next(following), tree)
