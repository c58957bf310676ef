"""Stacks of blocks with what they share in a call, and models of texts made of stacks."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from ...errors import UnsupportedModelError
from ...layers.arguments import boolean_masks
from ...layers.attention.positions import AddedPositions, AxialPositions, LearnedPositions
from ...layers.context import Context
from ...layers.embedding import TokenLayers, embed_tokens, known_rows
from ...layers.mixer import State, TokenMixer, check_state
from .block import Block
from .reversible import ReversibleBlock, ReversibleSequence, one_stream, two_streams
from .token_checks import ids_array

RunBlock = Callable[..., tuple[mx.array, State]]
"""Calls a block: `run(block, x, state, context, **arguments)` gives what the block gives."""


class Stack(nn.Module):
    r"""Blocks and the norm after them; the models that have a head are made of it.

    .. math::
        y = \mathrm{norm}\big(\mathrm{block}_n(\ldots\mathrm{block}_1(x))\big)

    Source: MetaFormer (Yu et al., arXiv 2111.11418).

    Args:
        blocks: The blocks, first to last; or reversible ones, whose two streams begin alike and are
            averaged after the last, unless a subclass has another `merged`.
        norm: The norm after the last.
        positions: Adds positions before the first block; `None`: nothing does.

    Attributes:
        channel_arrays: Arrays of a subclass whose last axis has a number for each channel of a token
            mixer.
        run_block: Calls each block, as one that recomputes it in the backward pass does; `None`: the
            stack does.

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
        self._is_reversible = bool(blocks) and isinstance(blocks[0], ReversibleBlock)
        self.norm = norm
        if positions is not None:
            self.positions = positions
        self.run_block: RunBlock | None = None

    @property
    def token_mixers(self) -> list[TokenMixer]:
        """All that carry a state: the blocks' mixers, first to last, and after them the positions."""
        added = [self.positions] if "positions" in self else []
        return [block[name] for block in self.blocks for name in block.carriers] + added

    @property
    def is_causal(self) -> bool:
        """True if each position sees only those before it and itself, so that a text can go on."""
        return all(mixer.is_causal for mixer in self.token_mixers)

    @property
    def packs_samples(self) -> bool:
        """True if a row may hold several samples, one after the other."""
        return all(mixer.packs_samples for mixer in self.token_mixers)

    def block_arguments(self) -> list[dict[str, mx.array]]:
        """The arguments of each block's token mixer alone; they depend on weights only."""
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
        rest = iter(state)
        counts = [len(block.carriers) for block in self.blocks]
        grouped = [tuple(islice(rest, count)) for count in counts]
        return [own[0] if count == 1 else own for own, count in zip(grouped, counts, strict=True)]

    def run(
        self,
        x: mx.array,
        state: tuple[State, ...] | None,
        context: Context,
        block_arguments: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """The normed residual stream after all blocks, and the new state.

        Args:
            x: The residual stream before them.
            state: That of each block; `None`: each begins anew.
            context: The tokens of the call; all blocks share what they compute of it.
            block_arguments: Those of `block_arguments()`, from a caller who has computed them before.

        Raises:
            ValueError: Samples begin inside rows and a token mixer cannot keep them apart.
        """
        each = self.block_arguments() if block_arguments is None else block_arguments
        new_state: list[State] = []
        added: tuple[State, ...] = ()
        if "positions" in self or context.starts is not None:
            x, state, added = self._placed(x, state, context)
        is_reversible, run = self._is_reversible, self.run_block
        x = two_streams(x) if is_reversible else x
        # items, since attributes of a module are slow to find
        is_flat = all(len(block["carriers"]) == 1 for block in self.blocks)
        states: Sequence[State] = [None] * len(self.blocks)
        if state is not None:
            states = state if is_flat else self._of_blocks(state)
        for block, arguments, old in zip(self.blocks, each, states, strict=True):
            if run is None:
                x, new = block(x, old, context, **arguments)
            else:
                x, new = run(block, x, old, context, **arguments)
            new_state += (new,) if is_flat or len(block.carriers) == 1 else new
        x = self.merged(x) if is_reversible else x
        return self.norm(x), (*new_state, *added)

    def transform(self, x: mx.array, context: Context | None = None) -> mx.array:
        """The normed residual stream after all blocks, of sequences that begin and end with the call.

        Reversible blocks keep no activations for a backward pass. Streams of 16 bits could not be
        undone exactly enough; theirs are kept.
        """
        context = Context() if context is None else context
        if not self._is_reversible or x.dtype != mx.float32 or self.run_block is not None:
            return self.run(x, None, context)[0]
        x, _, _ = self._placed(x, None, context)
        blocks = cast("list[ReversibleBlock]", self.blocks)
        x = self.merged(ReversibleSequence(blocks)(two_streams(x), context))
        return self.norm(x)

    def merged(self, x: mx.array) -> mx.array:
        """The input of the norm from both streams after reversible blocks, `(B, L, 2 D)`."""
        return one_stream(x)

    def _placed(
        self, x: mx.array, state: tuple[State, ...] | None, context: Context
    ) -> tuple[mx.array, tuple[State, ...] | None, tuple[State, ...]]:
        """The residual stream with positions, the state of the blocks, and the positions' state."""
        if context.starts is not None and not self.packs_samples:
            raise ValueError(
                "[model] 'starts' must be None for a model whose token mixers cannot keep the "
                "samples of a row apart. Give each sample a row of its own."
            )
        if "positions" not in self:
            return x, state, ()
        before, rest = (None, None) if state is None else (state[-1], state[:-1])
        x, after = self.positions.added(x, before, context)
        return x, rest, (after,)


class TokenModel(TokenLayers, Stack):
    r"""Embedding, blocks, norm, head.

    .. math::
        z = W\,\mathrm{norm}\big(
        \mathrm{block}_n(\ldots\mathrm{block}_1(\mathrm{embed}(\mathrm{tokens})))\big)

    Source: MetaFormer (Yu et al., arXiv 2111.11418), with tokens in the place of patches.

    Args:
        embed: The embedding, `(V, D)`.
        blocks: The blocks, first to last.
        norm: The norm before the head.
        head: Maps `(..., D)` to `(..., V)`; `None` ties it to the embedding.
        config: The architecture's configuration, stored as the attribute `config`.
        positions: Adds positions to the embedded tokens; `None`: nothing does.

    Attributes:
        pipeline: The task of such a model, as the Hub names it.
        purpose: The same as part of an error message.
        command: The command that uses such a model.
        embed_scale: What embedded tokens are multiplied by.
        hidden_scale: What the head gets the normed residual stream times.
        rounding: How its packed weights were made of floats, as `hub.checkpoint.checkpoint` has it.

    Shape:
        `tokens`: integers `(B, L)`; logits `(B, L, V)`, or `(B, C)` of a classifier.

    Example:
        >>> block = Block(32, MLGRU(32), SwiGLU(32))
        >>> model = Decoder(nn.Embedding(100, 32), [block], nn.RMSNorm(32))
        >>> isinstance(model, TokenModel), model.vocab_size, model.dims
        (True, 100, 32)
    """

    pipeline = ""
    purpose = ""
    command = ""

    def __init__(
        self,
        embed: nn.Embedding,
        blocks: Sequence[Block | ReversibleBlock],
        norm: nn.Module,
        head: nn.Module | None = None,
        config: Any = None,
        positions: AddedPositions | None = None,
    ):
        # first, so that weights are drawn in the order of the computation
        nn.Module.__init__(self)
        self.embed = embed
        super().__init__(blocks, norm, positions)
        if head is not None:
            self.head = head
        self.config = config
        self.vocab_size = int(embed.weight.shape[0])

    @cached_property
    def max_length(self) -> int | None:
        """The most tokens of a text, where a mixer or a table of positions ends; `None`: none does."""
        modules = self.modules()
        tables = (LearnedPositions, AxialPositions)
        bounds = [module.max_length for module in modules if isinstance(module, tables)]
        if any(isinstance(module, TokenMixer) and module.length_bound for module in modules):
            bounds.append(self.config.max_position_embeddings)
        return min(bounds, default=None)

    @property
    def context_length(self) -> int | None:
        """The most tokens of a text that the model was made for; `None`: any number.

        A longer text can be read unless `max_length` forbids it, but its results mean
        little. A recurrence that no positions are added to reads texts of any length.
        """
        mixers = self.token_mixers
        counts_on = "positions" not in self and all(mixer.recurrent for mixer in mixers)
        made_for = None if counts_on else getattr(self.config, "max_position_embeddings", None)
        bounds = (self.max_length, made_for)
        return min((bound for bound in bounds if bound is not None), default=None)

    def init_state(self, batch_size: int, dtype: mx.Dtype | None = None) -> tuple[State, ...]:
        return super().init_state(batch_size, self.dtype if dtype is None else dtype)

    def predictions(self, tokens: mx.array) -> mx.array:
        """The logits for tokens `(B, L)`, whatever else the model takes or returns when it is called."""
        raise NotImplementedError


class Decoder(TokenModel):
    """Continues texts: embedding, blocks, norm, head.

    Args:
        embed: The embedding, `(V, D)`.
        blocks: The blocks, first to last.
        norm: The norm before the head.
        head: Maps `(..., D)` to `(..., V)`; `None` ties it to the embedding.
        config: The architecture's configuration, stored as the attribute `config`.
        positions: Adds positions to the embedded tokens; `None`: nothing does.

    Shape:
        `tokens`: integers `(B, L)`. Of an array, one outside the vocabulary makes its row NaN from there
        on, since to look into it would wait for the device; lists of ids are checked.
        `valid`: booleans `(B, L)`, `False` where padded; `starts`: booleans `(B, L)`, `True` where
        another sample begins in the row; logits `(B, L, V)`.

    State:
        A tuple with the state of each block; every array has the batch on axis 0.

    Example:
        >>> blocks = [Block(32, MLGRU(32), SwiGLU(32, hidden_dims=64)) for _ in range(2)]
        >>> model = Decoder(nn.Embedding(100, 32), blocks, nn.RMSNorm(32))
        >>> logits, state = model(mx.array([[1, 2, 3]]))
        >>> logits.shape, len(state)
        ((1, 3, 100), 2)
    """

    pipeline = "text-generation"
    purpose = "continuing a text"
    command = "generate"

    def hidden(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        block_arguments: Sequence[dict[str, mx.array]] | None = None,
        by_position: bool = False,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """The normed residual stream before the head, `(B, L, D)`, and the new state.

        The tokens are taken as they are: their caller has checked them on the host, as a generator
        does. `block_arguments` is the result of `block_arguments()`, from a caller who has computed it
        before. With `by_position`, the new state is as mixers give it whose context asks so.
        """
        x = embed_tokens(self.embed, tokens, self.embed_scale)
        context = Context(valid, starts=starts, by_position=by_position)
        return self.run(x, state, context, block_arguments)

    def predictions(self, tokens: mx.array) -> mx.array:
        return self(tokens)[0]

    def known_hidden(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        block_arguments: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """Like `hidden`, for tokens that nobody has checked: one without a row makes its row NaN."""
        x = known_rows(self.embed, tokens, self.embed_scale)
        return self.run(x, state, Context(valid, starts=starts), block_arguments)

    def text_hidden(
        self,
        tokens: mx.array,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> mx.array:
        """Like `known_hidden`, of texts that begin and end with the call, without a state."""
        x = known_rows(self.embed, tokens, self.embed_scale)
        return self.transform(x, Context(valid, starts=starts))

    def __call__(
        self,
        tokens: mx.array | Sequence[Sequence[int]],
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        ids = ids_array(tokens, self.vocab_size)
        if state is not None:
            self.check_state(state, ids.shape[0])
        valid, starts = boolean_masks("Decoder", ids.shape, valid=valid, starts=starts)
        x, state = self.known_hidden(ids, state, valid, starts=starts)
        return self.logits(x), state

    def check_state(self, state: Any, batch_size: int) -> None:
        """Refuses the state of another model, or of another number of texts.

        Raises:
            TypeError, ValueError: It is one.
        """
        own = self.init_state(batch_size)
        if not isinstance(state, tuple) or len(state) != len(own):
            size = f" of {len(state)}" if isinstance(state, tuple) else ""
            raise TypeError(
                f"[Decoder] 'state' must be one that this model returned, a tuple of {len(own)} states, "
                f"but got {type(state).__name__}{size}. Begin with state=None."
            )
        for each, given in zip(own, state, strict=True):
            check_state("Decoder", each, given)


def check_causal(model: TokenModel) -> None:
    """Refuses a model that cannot continue a text.

    Args:
        model: The model.

    Raises:
        UnsupportedModelError: It is made for something else, or a token mixer sees what comes after.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> check_causal(model)
    """
    if not isinstance(model, Decoder) or model.purpose != Decoder.purpose:
        raise UnsupportedModelError(
            f"[model] the model must continue texts but {type(model).__name__} is for {model.purpose}. "
            f"Use 'mmfree {model.command}' for it, or load it in Python with mlx_mmfree.load_model."
        )
    for number, mixer in enumerate(model.token_mixers):
        if not mixer.is_causal:
            raise UnsupportedModelError(
                "[model] every token mixer must be causal, so that a text can go on, but "
                f"{type(mixer).__name__} of block {number} sees the whole text."
            )
