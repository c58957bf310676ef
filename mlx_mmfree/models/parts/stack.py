"""Blocks one after the other, with what they share in a call."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...layers.token_mixer import State
from .block import Block

RunBlock = Callable[..., tuple[mx.array, State]]
"""Calls a block: `run(block, x, state, valid, **context)` gives what the block gives."""


def run_block(
    block: Block, x: mx.array, state: State, valid: mx.array | None, **context: Any
) -> tuple[mx.array, State]:
    return block(x, state, valid, **context)


class Stack(nn.Module):
    """Blocks and the norm after them; the models that have a head are made of it.

    Args:
        blocks: The blocks, first to last.
        norm: The norm after the last.

    Attributes:
        run_block: Calls each block; another one may recompute it in the backward pass.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        A tuple with the state of each block; every array has the batch on axis 0.
    """

    def __init__(self, blocks: Sequence[Block], norm: nn.Module):
        super().__init__()
        self.blocks = list(blocks)
        self.norm = norm
        self.run_block: RunBlock = run_block

    @property
    def is_causal(self) -> bool:
        """Whether each position sees only those before it and itself, so that a text can go on."""
        return all(block.token_mixer.is_causal for block in self.blocks)

    @property
    def packs_samples(self) -> bool:
        """Whether a row may hold several samples, one behind the other."""
        return all(block.token_mixer.packs_samples for block in self.blocks)

    def context(self) -> list[dict[str, mx.array]]:
        """What each block's token mixer is given beside its input; it depends on weights alone."""
        return [{}] * len(self.blocks)

    def run(
        self,
        x: mx.array,
        state: tuple[State, ...],
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        context: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """The normed residual stream after all blocks, and the new state.

        Args:
            x: The residual stream before them.
            state: That of each block.
            valid: Booleans `(B, L)`, `False` where padded.
            starts: Booleans `(B, L)`, `True` where another sample begins in the row.
            context: That of `context()`, to be given by a caller who has computed it before.

        Raises:
            ValueError: `starts` is given and a token mixer cannot keep samples apart.
        """
        context = self.context() if context is None else context
        if starts is not None:
            if not self.packs_samples:
                raise ValueError(
                    "[model] 'starts' must be None for a model whose token mixers cannot keep the "
                    "samples of a row apart. Give each sample a row of its own."
                )
            context = [{**given, "starts": starts} for given in context]
        new_state = []
        for block, given, old in zip(self.blocks, context, state, strict=True):
            x, new = self.run_block(block, x, old, valid, **given)
            new_state.append(new)
        return self.norm(x), tuple(new_state)
