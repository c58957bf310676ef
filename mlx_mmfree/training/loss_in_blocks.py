"""Losses of many tokens over a large vocabulary, block by block, so that logits are never held whole."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from .random_key import random_key, set_random_key


def losses_in_blocks(
    modules: Sequence[nn.Module],
    loss: Callable[..., mx.array],
    hidden: mx.array,
    given: Sequence[mx.array],
    rows: int,
) -> mx.array:
    """The losses of all tokens. Their gradients compute each block again, one after the other.

    Args:
        modules: The modules whose trainable parameters the loss uses.
        loss: Maps the rows of some tokens, of `hidden` and of each of `given`, to losses `(R,)`.
        hidden: The hidden values `(T, D)`.
        given: What else the loss is computed from, `(T, ...)`. It gets no gradient.
        rows: The number of tokens in a block.

    Returns:
        float32 `(T,)`.
    """
    key = random_key()
    own = [module.trainable_parameters() for module in modules]
    blocks = [slice(start, start + rows) for start in range(0, hidden.shape[0], rows)]

    def of_block(
        parameters: Any, hidden: mx.array, given: list[mx.array], block: slice
    ) -> mx.array:
        # dropout must drop the same numbers in both passes
        set_random_key(key + mx.array([0, block.start], mx.uint32))
        _update(modules, parameters)
        return loss(hidden, *(array[block] for array in given))

    def forward(parameters: Any, hidden: mx.array, given: list[mx.array]) -> mx.array:
        parts: list[mx.array] = []
        for block in blocks:
            values = _after([hidden[block]], parts[-1:])[0]
            parts.append(of_block(parameters, values, given, block))
        return mx.concatenate(parts)

    def backward(primals: Any, cotangent: mx.array, outputs: Any) -> Any:
        parameters, hidden, given = primals
        flat = [array for _, array in cast(Any, tree_flatten(parameters))]
        # 16 bits would lose what later blocks add
        sums = [mx.zeros(array.shape) for array in flat]
        of_hidden: list[mx.array] = []
        for block in blocks:
            # a block waits for the gradients of the one before
            inputs = _after([*flat, hidden[block]], [cotangent, *sums, *of_hidden[-1:]])

            def of_inputs(*arrays: mx.array, block: slice = block) -> mx.array:
                known = _like(parameters, arrays[:-1])
                return of_block(known, arrays[-1], given, block)

            *added, last = mx.vjp(of_inputs, inputs, [cotangent[block]])[1]
            sums = [total + part for total, part in zip(sums, added, strict=True)]
            of_hidden.append(last)
        _update(modules, parameters)
        sums = [total.astype(array.dtype) for total, array in zip(sums, flat, strict=True)]
        none = [mx.zeros_like(array) for array in given]
        return _like(parameters, sums), mx.concatenate(of_hidden), none

    # parameters are given to the function, so that they get gradients
    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    losses: mx.array = function(own, hidden, list(given))
    _update(modules, own)
    return losses


def _update(modules: Sequence[nn.Module], parameters: Sequence[Any]) -> None:
    for module, own in zip(modules, parameters, strict=True):
        module.update(own)


def _after(arrays: list[mx.array], others: list[mx.array]) -> list[mx.array]:
    """The arrays, which are computed after the others."""
    after: Any = mx.depends(arrays, others) if others else arrays
    return list(after)


def _like(tree: Any, arrays: Sequence[mx.array]) -> Any:
    """The arrays in the structure of a tree."""
    following = iter(arrays)
    return tree_map(lambda _: next(following), tree)
