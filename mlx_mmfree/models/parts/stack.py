"""Blocks one after the other, with what they share in a call."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from ...layers import apply_norm
from ...layers.attention.positions import AddedPositions
from ...layers.context import Context
from ...layers.mixer import State, TokenMixer
from .block import Block, ReversibleBlock, ReversibleSequence, one_stream, two_streams

RunBlock = Callable[..., tuple[mx.array, State]]
"""Calls a block: `run(block, x, state, context, **arguments)` gives what the block gives."""


def run_block(
    block: Block, x: mx.array, state: State, context: Context, **arguments: Any
) -> tuple[mx.array, State]:
    return block(x, state, context, **arguments)


class Stack(nn.Module):
    r"""Blocks and the norm after them; the models that have a head are made of it.

    .. math::
        y = \mathrm{norm}\big(\mathrm{block}_n(\ldots\mathrm{block}_1(x))\big)

    Source: MetaFormer (Yu et al., arXiv 2111.11418).

    Args:
        blocks: The blocks, first to last; or reversible ones, whose two streams begin alike and are
            averaged behind the last, unless a subclass has another `joined`.
        norm: The norm after the last.
        positions: Adds positions before the first block; `None`: nothing does.

    Attributes:
        channel_arrays: Arrays of a subclass whose last axis has a number for each channel of a token
            mixer.
        run_block: Calls each block; another one may recompute it in the backward pass.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        A tuple with the state of each of `token_mixers`; every array has the batch on axis 0.

    Example:
        >>> stack = Stack([Block(32, GQA(32), SwiGLU(32))], nn.RMSNorm(32))
        >>> stack.transform(mx.zeros((1, 5, 32))).shape
        (1, 5, 32)
    """

    channel_arrays: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        blocks: Sequence[Block | ReversibleBlock],
        norm: nn.Module,
        positions: AddedPositions | None = None,
    ):
        super().__init__()
        self.blocks: list[Block | ReversibleBlock] = list(blocks)
        self.norm = norm
        if positions is not None:
            self.positions = positions
        self.run_block: RunBlock = run_block

    @property
    def token_mixers(self) -> list[TokenMixer]:
        """All that carry a state: those of the blocks, first to last, and after them the positions."""
        added = [self.positions] if "positions" in self else []
        return [mixer for block in self.blocks for mixer in block.carriers] + added

    @property
    def is_causal(self) -> bool:
        """Whether each position sees only those before it and itself, so that a text can go on."""
        return all(mixer.is_causal for mixer in self.token_mixers)

    @property
    def packs_samples(self) -> bool:
        """Whether a row may hold several samples, one behind the other."""
        return all(mixer.packs_samples for mixer in self.token_mixers)

    def block_arguments(self) -> list[dict[str, mx.array]]:
        """What each block's token mixer is given for itself; it depends on weights alone."""
        return [{}] * len(self.blocks)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[State, ...]:
        """The state before the first position, for a residual stream of this dtype."""
        state: list[State] = []
        for block in self.blocks:
            own = block.init_state(batch_size, dtype)
            state += own if len(block.carriers) > 1 else (own,)
        added = [self.positions.init_state(batch_size, dtype)] if "positions" in self else []
        return (*state, *added)

    def _of_blocks(self, state: Sequence[State]) -> Sequence[State]:
        """The states of all mixers, as one for each block."""
        if len(state) == len(self.blocks):
            return state
        rest = iter(state)
        counts = [len(block.carriers) for block in self.blocks]
        grouped = [tuple(islice(rest, count)) for count in counts]
        return [own[0] if count == 1 else own for own, count in zip(grouped, counts, strict=True)]

    def run(
        self,
        x: mx.array,
        state: tuple[State, ...],
        context: Context,
        block_arguments: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """The normed residual stream after all blocks, and the new state.

        Args:
            x: The residual stream before them.
            state: That of each block.
            context: The tokens of the call; all blocks share what they compute of it.
            block_arguments: Those of `block_arguments()`, from a caller who has computed them before.

        Raises:
            ValueError: Samples begin inside rows and a token mixer cannot keep them apart.
        """
        each = self.block_arguments() if block_arguments is None else block_arguments
        x, state, added = self._placed(x, state, context)
        new_state: list[State] = []
        x = two_streams(x) if self._is_reversible else x
        for block, arguments, old in zip(self.blocks, each, self._of_blocks(state), strict=True):
            x, new = self.run_block(block, x, old, context, **arguments)
            new_state += new if len(block.carriers) > 1 else (new,)
        x = self.joined(x) if self._is_reversible else x
        return apply_norm(self.norm, x), (*new_state, *added)

    def transform(self, x: mx.array, context: Context | None = None) -> mx.array:
        """The normed residual stream after all blocks, of sequences that begin and end with the call.

        Reversible blocks keep no activations for a backward pass. Streams of 16 bits could not be
        undone exactly enough; theirs are kept.
        """
        context = Context() if context is None else context
        state = self.init_state(x.shape[0], x.dtype)
        is_plain = self.run_block is run_block
        if not self._is_reversible or x.dtype != mx.float32 or not is_plain:
            return self.run(x, state, context)[0]
        x, _, _ = self._placed(x, state, context)
        blocks = cast("list[ReversibleBlock]", self.blocks)
        x = self.joined(ReversibleSequence(blocks)(two_streams(x), context))
        return apply_norm(self.norm, x)

    def joined(self, x: mx.array) -> mx.array:
        """What the norm gets of both streams behind reversible blocks, `(B, L, 2 D)`."""
        return one_stream(x)

    @property
    def _is_reversible(self) -> bool:
        return bool(self.blocks) and isinstance(self.blocks[0], ReversibleBlock)

    def _placed(
        self, x: mx.array, state: tuple[State, ...], context: Context
    ) -> tuple[mx.array, tuple[State, ...], tuple[State, ...]]:
        """The residual stream with positions, the state of the blocks, and that of the positions."""
        if context.starts is not None and not self.packs_samples:
            raise ValueError(
                "[model] 'starts' must be None for a model whose token mixers cannot keep the "
                "samples of a row apart. Give each sample a row of its own."
            )
        if "positions" not in self:
            return x, state, ()
        x, after = self.positions.added(x, state[-1], context)
        return x, state[:-1], (after,)
