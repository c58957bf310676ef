"""Residual blocks, stacks of them with what they share in a call, and models of texts made of stacks."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from itertools import islice
from operator import index
from typing import Any, ClassVar, Literal, cast, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ...errors import UnsupportedModelError
from ...layers import ChannelMixer
from ...layers.arguments import check_features, check_sizes
from ...layers.attention.positions import AddedPositions, AxialPositions, LearnedPositions
from ...layers.context import Context
from ...layers.embedding import TokenLayers, embed_tokens, known_rows
from ...layers.mixer import State, TokenMixer
from ...layers.norms import RMSNorm

NormOrder = Literal["pre", "post", "branch", "sandwich", "parallel", "none"]
Branch = Callable[[mx.array], mx.array]


class Block(nn.Module):
    r"""Residual block, with its norms where they are asked for.

    .. math::
        \text{pre:}\quad u &= x + \mathrm{TokenMixer}(\mathrm{norm}(x)), \quad
        y = u + \mathrm{ChannelMixer}(\mathrm{norm}(u)) \\
        \text{post:}\quad u &= \mathrm{norm}(x + \mathrm{TokenMixer}(x)), \quad
        y = \mathrm{norm}(u + \mathrm{ChannelMixer}(u)) \\
        \text{branch:}\quad u &= x + \mathrm{norm}(\mathrm{TokenMixer}(x)), \quad
        y = u + \mathrm{norm}(\mathrm{ChannelMixer}(u)) \\
        \text{sandwich:}\quad u &= x + \mathrm{norm}(\mathrm{TokenMixer}(\mathrm{norm}(x))), \quad
        y = u + \mathrm{norm}(\mathrm{ChannelMixer}(\mathrm{norm}(u))) \\
        \text{parallel:}\quad y &= x + \mathrm{TokenMixer}(\mathrm{norm}(x))
        + \mathrm{ChannelMixer}(\mathrm{norm}(x))

    OLMo 2 (arXiv 2501.00656) has norms on the branches alone, Gemma 2 (arXiv 2408.00118) on both sides,
    and GPT-NeoX (arXiv 2204.06745) has parallel mixers. `set_dropout` drops
    elements of what the mixers add, in training. A memory mixer, between the two and of the same form,
    mixes a second sequence in, as the decoder of an encoder-decoder does (Vaswani et al., arXiv
    1706.03762).

    Args:
        dims: Model dims `D`.
        token_mixer: Mixes along the sequence.
        channel_mixer: Mixes within a position; a token mixer in its place may look back. `None`: there
            is none, as in Mamba.
        memory_mixer: Mixes in a second sequence.
        norm: Makes a norm, called as `norm(dims, eps=...)`.
        norm_eps: Epsilon of the norms.
        norm_order: Where they stand.

    Attributes:
        drops: Whether `set_dropout` applies.

    Parameters:
        Of the mixers; `token_norm` and the like, and for a norm on a branch `token_output_norm`.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        That of the token mixer, or with a memory mixer a tuple of both states. Where the channel mixer
        has one too, a tuple of that and the channel mixer's.

    Raises:
        ValueError: The order is unknown, or the memory mixer takes no second sequence.

    Example:
        >>> block = Block(32, MLGRU(32), SwiGLU(32, hidden_dims=64))
        >>> y, state = block(mx.zeros((1, 5, 32)))
        >>> y.shape
        (1, 5, 32)
    """

    drops: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        token_mixer: TokenMixer,
        channel_mixer: ChannelMixer | TokenMixer | None,
        *,
        memory_mixer: TokenMixer | None = None,
        norm: Callable[..., nn.Module] = RMSNorm,
        norm_eps: float = 1e-6,
        norm_order: NormOrder = "pre",
    ):
        super().__init__()
        check_sizes(type(self).__name__, dims=dims)
        if norm_order not in get_args(NormOrder):
            known = ", ".join(map(repr, get_args(NormOrder)))
            raise ValueError(f"[Block] 'norm_order' must be one of {known} but got {norm_order!r}.")
        if memory_mixer is not None and not memory_mixer.cross:
            raise ValueError(
                "[Block] 'memory_mixer' must take a second sequence but got a "
                f"{type(memory_mixer).__name__}."
            )
        mixers = {"token": token_mixer, "memory": memory_mixer, "channel": channel_mixer}
        for name, mixer in mixers.items():
            if mixer is not None:
                if norm_order not in ("branch", "none"):
                    self[f"{name}_norm"] = norm(dims, eps=norm_eps)
                if norm_order in ("branch", "sandwich"):
                    self[f"{name}_output_norm"] = norm(dims, eps=norm_eps)
                self[f"{name}_mixer"] = mixer
        self._order: str = norm_order
        self._names = tuple(name for name, mixer in mixers.items() if mixer is not None)
        # the token mixer, and the channel mixer if it has a state
        carries = isinstance(channel_mixer, TokenMixer)
        self.carriers = ("token_mixer", "channel_mixer") if carries else ("token_mixer",)
        self._dropout = 0.0

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> State:
        own = self.token_mixer.init_state(batch_size, dtype)
        if "memory_mixer" in self:
            own = own, self.memory_mixer.init_state(batch_size, dtype)
        channel = self.get("channel_mixer")
        return (
            (own, channel.init_state(batch_size, dtype)) if isinstance(channel, TokenMixer) else own
        )

    def __call__(
        self, x: mx.array, state: State = None, context: Context | None = None, **arguments: Any
    ) -> tuple[mx.array, State]:
        """`context` is what all blocks share; `arguments`, as a lower bound, go to the token mixer."""
        context = Context() if context is None else context
        states, given = self._states_of(state), x
        for name in self._names:
            own = arguments if name == "token" else {}
            x, states[name] = self.add(name, x, given, states[name], context, **own)
            given = given if self._order == "parallel" else x
        return x, self._state_of(states)

    def add(
        self,
        name: str,
        x: mx.array,
        given: mx.array,
        state: State,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, State]:
        """`x` and what a mixer makes of `given`, with the norms of the order, and the mixer's state."""
        y, state = self.branch(name, given, state, context, **arguments)
        y = x + self._dropped(self.normed(name, "branch", y))
        return self.normed(name, "after", y), state

    def branch(
        self, name: str, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> tuple[mx.array, State]:
        """`mixer(norm(x))`, and the mixer's state."""
        mixer, x = self[f"{name}_mixer"], self.normed(name, "before", x)
        if not isinstance(mixer, TokenMixer):
            return mixer(x), None
        y, state = mixer(x, state, context=self.seen_by(name, context), **arguments)
        return y, state

    def seen_by(self, name: str, context: Context) -> Context:
        """A second sequence is seen by the memory mixer alone, where there is one."""
        hides = "memory" in self._names and name != "memory"
        return context.with_memory(None) if hides else context

    def norm_at(self, name: str, place: str) -> nn.Module | None:
        """The norm "before" or "after" a mixer, or on its "branch"; `None`: there is none."""
        if place == "branch":
            return cast(nn.Module | None, self.get(f"{name}_output_norm"))
        is_there = (place == "after") == (self._order == "post")
        return self.get(f"{name}_norm") if is_there else None

    def normed(self, name: str, place: str, x: mx.array) -> mx.array:
        norm = self.norm_at(name, place)
        return x if norm is None else cast(mx.array, norm(x))

    @property
    def is_dropping(self) -> bool:
        return self._dropout > 0 and self.training

    def _dropped(self, y: mx.array) -> mx.array:
        return nn.Dropout(self._dropout)(y) if self.is_dropping else y

    def _states_of(self, state: State) -> dict[str, State]:
        """The state of each mixer."""
        own, channel = state, None
        if len(self.carriers) > 1:
            own, channel = (None, None) if state is None else state
        memory = None
        if "memory" in self._names:
            own, memory = (None, None) if own is None else own
        return {"token": own, "memory": memory, "channel": channel}

    def _state_of(self, states: dict[str, State]) -> State:
        own = states["token"]
        own = (own, states["memory"]) if "memory" in self._names else own
        return (own, states["channel"]) if len(self.carriers) > 1 else own

    def mixing_weights(
        self, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> dict[str, Callable[[], mx.array]]:
        """The functions that give the weights of "token" and "memory" mixer for the input of a call."""
        weights: dict[str, Callable[[], mx.array]]
        weights = {"token": partial(self._weights, "token", x, **arguments)}
        if "memory_mixer" in self:
            given = x
            if self._order != "parallel":
                first = copy(self)
                first._names, first.carriers = ("token",), ("token_mixer",)
                own = state[0] if state is not None and len(self.carriers) > 1 else state
                own = None if own is None else own[0]
                given, _ = first(x, own, context.with_memory(None), **arguments)
            weights["memory"] = partial(self._weights, "memory", given, memory=context.memory)
        return weights

    def _weights(self, name: str, x: mx.array, **arguments: Any) -> mx.array:
        mixer: TokenMixer = self[name + "_mixer"]
        return mixer.mixing_weights(self.normed(name, "before", x), **arguments)


def set_dropout(model: nn.Module, probability: float) -> int:
    r"""Sets, in place, with which probability training drops each element of what a mixer adds.

    .. math::
        y = x + \frac{m}{1 - p} \odot \mathrm{Mixer}(\mathrm{norm}(x)), \quad
        m_i \sim \mathrm{Bernoulli}(1 - p)

    takes the place of both sums of every `Block` that is not reversible. A model that does not train
    computes as before.
    Source: Vaswani et al., arXiv 1706.03762, section 5.4.

    Args:
        model: What holds the blocks.
        probability: :math:`p`, at least 0 and below 1.

    Returns:
        The number of blocks.

    Raises:
        ValueError: `probability` is out of range.

    Example:
        >>> from mlx_mmfree.channel_mixers import SwiGLU
        >>> from mlx_mmfree.token_mixers import MLGRU
        >>> set_dropout(Block(32, MLGRU(32), SwiGLU(32, hidden_dims=64)), 0.1)
        1
    """
    if not 0 <= probability < 1:
        raise ValueError(
            f"[Block] 'probability' must be at least 0 and below 1 but got {probability}."
        )
    blocks = [
        module for _, module in model.named_modules() if isinstance(module, Block) and module.drops
    ]
    for block in blocks:
        block._dropout = probability
    return len(blocks)


class ReversibleBlock(Block):
    r"""Two streams, of which each gets a mixer of the other (Reformer, arXiv 2001.04451).

    .. math::
        y_1 = x_1 + \mathrm{TokenMixer}(\mathrm{norm}(x_2)), \quad
        y_2 = x_2 + \mathrm{ChannelMixer}(\mathrm{norm}(y_1))

    Its inputs follow from its outputs, by subtraction in the reverse order (Gomez et al., arXiv
    1707.04585).

    Args:
        dims: Dims `D` of each stream.
        token_mixer: Mixes along the sequence.
        channel_mixer: Mixes within a position.
        norm: Makes a norm, called as `norm(dims, eps=...)`; `None`: there are none.
        norm_eps: Epsilon of the norms.

    Shape:
        `x` and `y`: both streams side by side, `(B, L, 2 D)`.

    State:
        That of the token mixer.
    """

    drops = False

    def __init__(
        self,
        dims: int,
        token_mixer: TokenMixer,
        channel_mixer: ChannelMixer,
        *,
        norm: Callable[..., nn.Module] | None = nn.LayerNorm,
        norm_eps: float = 1e-6,
    ):
        order: NormOrder = "none" if norm is None else "pre"
        make = nn.LayerNorm if norm is None else norm
        super().__init__(
            dims, token_mixer, channel_mixer, norm=make, norm_eps=norm_eps, norm_order=order
        )
        self._dims = dims
        self._order = "reversible"

    def __call__(
        self, x: mx.array, state: State = None, context: Context | None = None, **arguments: Any
    ) -> tuple[mx.array, State]:
        check_features("ReversibleBlock", x, 2 * self._dims)
        context = Context() if context is None else context
        first, second = mx.split(x, 2, axis=-1)
        first, state = self.add("token", first, second, state, context, **arguments)
        second, _ = self.add("channel", second, first, None, context)
        return mx.concatenate([first, second], axis=-1), state

    def mixing_weights(
        self, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> dict[str, Callable[[], mx.array]]:
        return super().mixing_weights(mx.split(x, 2, axis=-1)[1], state, context, **arguments)

    def of_tokens(self, context: Context, x: mx.array) -> mx.array:
        """The share of the second stream that is added to the first, of whole sequences."""
        return self.branch("token", x, None, context)[0]

    def of_channels(self, x: mx.array) -> mx.array:
        """The share of the first stream that is added to the second."""
        return self.branch("channel", x, None, Context())[0]


def two_streams(x: mx.array) -> mx.array:
    """Both streams before the first block, each the residual stream `(B, L, D)`."""
    return mx.concatenate([x, x], axis=-1)


def one_stream(x: mx.array) -> mx.array:
    """The residual stream after the last block: the mean of both, `(B, L, D)`."""
    first, second = mx.split(x, 2, axis=-1)
    return (first + second) / 2


class ReversibleSequence(nn.Module):
    """Reversible blocks over whole sequences, whose backward pass undoes them one by one.

    Of all activations only the last ones are kept: the memory of training does not grow with the number
    of blocks but for their parameters and gradients. The backward pass computes each mixer once more.
    What it undoes is rounded anew in each block, so that its gradients differ a little from the
    gradients with kept activations; streams in 16 bits are not exact enough. Mixers must give the same
    twice: dropout does not.

    Args:
        blocks: The blocks, first to last.

    Shape:
        `x` and `y`: both streams side by side, `(B, L, 2 D)`.
    """

    def __init__(self, blocks: Sequence[ReversibleBlock]):
        super().__init__()
        self.blocks = list(blocks)

    def __call__(self, x: mx.array, context: Context | None = None) -> mx.array:
        context = Context() if context is None else context
        blocks = self.blocks
        parameters = [block.trainable_parameters() for block in blocks]

        def forward(parameters: list[dict[str, Any]], x: mx.array) -> mx.array:
            for block, own in zip(blocks, parameters, strict=True):
                block.update(own)
                x = block(x, None, context)[0]
            return x

        def backward(primals: Any, gradient: mx.array, y: mx.array) -> Any:
            found: list[Any] = [None] * len(blocks)
            for n in reversed(range(len(blocks))):
                y, gradient, found[n] = _undone(blocks[n], primals[0][n], y, gradient, context)
            return found, gradient

        reversible: Any = mx.custom_function(forward)
        reversible.vjp(backward)
        result: mx.array = reversible(parameters, x)
        if context.handed:
            raise ValueError(
                "[ReversibleSequence] 'blocks' must hand nothing to later ones, since a backward pass "
                f"that undoes them cannot follow it, but they hand on {', '.join(context.handed)}."
            )
        for block, own in zip(blocks, parameters, strict=True):
            block.update(own)
        return result


def _undone(
    block: ReversibleBlock, parameters: Any, y: mx.array, gradient: mx.array, context: Context
) -> tuple[mx.array, mx.array, Any]:
    """The input of a block, its gradient and the parameters', from its output and gradient."""
    first, second = mx.split(y, 2, axis=-1)
    of_first, of_second = mx.split(gradient, 2, axis=-1)

    def mixer(branch: Branch) -> Callable[[Any, mx.array], mx.array]:
        def call(parameters: Any, x: mx.array) -> mx.array:
            block.update(parameters)
            return branch(x)

        return call

    mixed, own, of_input = _vjp(mixer(block.of_channels), parameters, first, of_second)
    second, of_first = second - mixed, of_first + of_input
    mixed, others, of_input = _vjp(
        mixer(partial(block.of_tokens, context)), parameters, second, of_first
    )
    first, of_second = first - mixed, of_second + of_input
    parts = [first, second, of_first, of_second]
    gradients = [a + b for a, b in zip(own, others, strict=True)]
    # the block before waits until all gradients of this one are there, and nothing else of it is kept
    parts = mx.depends(parts, [*parts, *gradients])
    return (
        mx.concatenate(parts[:2], axis=-1),
        mx.concatenate(parts[2:], axis=-1),
        _unflatten(parameters, gradients),
    )


def _vjp(
    call: Callable[[Any, mx.array], mx.array], parameters: Any, x: mx.array, gradient: mx.array
) -> tuple[mx.array, list[mx.array], mx.array]:
    """The result of a mixer, and the gradients of the parameters and of its input."""

    def flat(*arrays: mx.array) -> list[mx.array]:
        return [call(_unflatten(parameters, arrays[:-1]), arrays[-1])]

    leaves = [array for _, array in cast(Any, tree_flatten(parameters))]
    # computed only when the gradient is known, so that nothing is kept until then
    *leaves, x = mx.depends([*leaves, x], [gradient])
    outputs, gradients = mx.vjp(flat, [*leaves, x], [gradient])
    return outputs[0], list(gradients[:-1]), gradients[-1]


def _unflatten(tree: Any, arrays: Sequence[mx.array]) -> Any:
    """Puts arrays into the structure of a tree."""
    following = iter(arrays)
    return tree_map(lambda _: next(following), tree)


def check_tokens(ids: Sequence[Any], vocab_size: int) -> None:
    """Refuses ids that have no row in the embedding; runs on the host, without an array.

    Raises:
        ValueError: An id is no whole number within `[0, vocab_size)`.
    """
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ValueError(
                f"[tokens] ids must be whole numbers but got {token!r:.100} at position {position}."
            )
        if not 0 <= index(token) < vocab_size:
            raise ValueError(
                f"[tokens] ids must lie within the model's vocabulary, 0 to {vocab_size - 1}, but "
                f"got {token} at position {position}. Leave this token out, or use the tokenizer that "
                "belongs to the model."
            )


def check_length(count: int, most: int | None) -> None:
    """Refuses a text with more tokens than a model was made for, if it was made for so many.

    Raises:
        ValueError: There are more.
    """
    if most is not None and count > most:
        raise ValueError(
            f"[tokens] a text must have at most {most} tokens, as many as the model was made for, but "
            f"got {count}. Shorten it."
        )


def token_array(ids: Sequence[Any], vocab_size: int) -> mx.array:
    """The checked ids as `int32` of shape `(1, L)`, one sequence.

    Raises:
        ValueError: There is no id, or one is outside the vocabulary.
    """
    if not len(ids):
        raise ValueError("[tokens] at least one id must be given but got none.")
    check_tokens(ids, vocab_size)
    return mx.array([index(token) for token in ids], mx.int32)[None]


RunBlock = Callable[..., tuple[mx.array, State]]
"""Calls a block: `run(block, x, state, context, **arguments)` gives what the block gives."""


class Stack(nn.Module):
    r"""Blocks and the norm after them; the models that have a head are made of it.

    .. math::
        y = \mathrm{norm}\big(\mathrm{block}_n(\ldots\mathrm{block}_1(x))\big)

    Source: MetaFormer (Yu et al., arXiv 2111.11418).

    Args:
        blocks: The blocks, first to last; or reversible ones, whose two streams begin alike and are
            averaged after the last, unless a subclass has another `joined`.
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
        """Whether each position sees only those before it and itself, so that a text can go on."""
        return all(mixer.is_causal for mixer in self.token_mixers)

    @property
    def packs_samples(self) -> bool:
        """Whether a row may hold several samples, one after the other."""
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
        x = self.joined(x) if is_reversible else x
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
        x = self.joined(ReversibleSequence(blocks)(two_streams(x), context))
        return self.norm(x)

    def joined(self, x: mx.array) -> mx.array:
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
        config: The architecture's configuration, kept as the attribute `config`.
        positions: Adds positions to the embedded tokens; `None`: nothing does.

    Attributes:
        purpose: What such a model is for, in the words of an error message.
        command: The command that uses such a model.
        embed_scale, hidden_scale: As of `TokenLayers`.
        rounding: How its packed weights were made of floats, as `hub.checkpoint.checkpoint` has it.

    Shape:
        `tokens`: integers `(B, L)`; logits `(B, L, V)`, or `(B, C)` of a classifier.

    Example:
        >>> block = Block(32, MLGRU(32), SwiGLU(32))
        >>> model = Decoder(nn.Embedding(100, 32), [block], nn.RMSNorm(32))
        >>> isinstance(model, TokenModel), model.vocab_size, model.dims
        (True, 100, 32)
    """

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

        A longer text can be read unless `max_length` forbids it, but what is said of it means little. A
        recurrence that no positions are added to reads texts of any length.
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

    Args: as of `TokenModel`.

    Shape:
        `tokens`: integers `(B, L)`, of which one outside the vocabulary makes its row NaN from there on;
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
        """As `hidden`, for tokens that nobody has checked: one without a row makes its row NaN."""
        x = known_rows(self.embed, tokens, self.embed_scale)
        return self.run(x, state, Context(valid, starts=starts), block_arguments)

    def text_hidden(
        self,
        tokens: mx.array,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> mx.array:
        """As `known_hidden`, of texts that begin and end with the call, without a state."""
        x = known_rows(self.embed, tokens, self.embed_scale)
        return self.transform(x, Context(valid, starts=starts))

    def __call__(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        x, state = self.known_hidden(tokens, state, valid, starts=starts)
        return self.logits(x), state


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
