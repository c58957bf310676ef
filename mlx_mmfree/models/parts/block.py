"""The residual block: a token mixer and a channel mixer, with their norms."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import mlx.core as mx
import mlx.nn as nn

from ...layers import ChannelMixer
from ...layers.arguments import check_sizes
from ...layers.context import Context
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
    elements of what the mixers add, in training. A memory mixer, between the two and normed alike,
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

    def norm_at(self, name: str, when: str) -> nn.Module | None:
        """The norm "before" or "after" a mixer, or on its "branch"; `None`: there is none."""
        if when == "branch":
            return cast(nn.Module | None, self.get(f"{name}_output_norm"))
        is_there = (when == "after") == (self._order == "post")
        return self.get(f"{name}_norm") if is_there else None

    def normed(self, name: str, when: str, x: mx.array) -> mx.array:
        norm = self.norm_at(name, when)
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
