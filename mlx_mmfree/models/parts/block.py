"""One residual block: a token mixer and a channel mixer (MetaFormer, arXiv 2111.11418)."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn

from ...layers import ChannelMixer
from ...layers.arguments import check_sizes
from ...layers.context import Context
from ...layers.mixer import State, TokenMixer

NormOrder = Literal["pre", "post", "none"]


class Block(nn.Module):
    r"""Residual block, with its norms before the mixers, behind the sums, or without any.

    .. math::
        \text{pre:}\quad u &= x + \mathrm{TokenMixer}(\mathrm{norm}(x)), \quad
        y = u + \mathrm{ChannelMixer}(\mathrm{norm}(u)) \\
        \text{post:}\quad u &= \mathrm{norm}(x + \mathrm{TokenMixer}(x)), \quad
        y = \mathrm{norm}(u + \mathrm{ChannelMixer}(u))

    `set_dropout` drops elements of what the mixers add, in training. A memory mixer, between the two
    and of the same form, mixes a second sequence in, as the decoder of an encoder-decoder does
    (Vaswani et al., arXiv 1706.03762).

    Args:
        dims: Model dims `D`.
        token_mixer: Mixes along the sequence.
        channel_mixer: Mixes within a position.
        memory_mixer: Mixes in a second sequence.
        norm: Makes a norm, called as `norm(dims, eps=...)`.
        norm_eps: Epsilon of the norms.
        norm_order: Where they stand.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        That of the token mixer, or with a memory mixer a tuple of both states.

    Raises:
        ValueError: The order is unknown, or the memory mixer takes no second sequence.

    Example:
        >>> block = Block(32, MLGRU(32), SwiGLU(32, hidden_dims=64))
        >>> y, state = block(mx.zeros((1, 5, 32)))
        >>> y.shape
        (1, 5, 32)
    """

    def __init__(
        self,
        dims: int,
        token_mixer: TokenMixer,
        channel_mixer: ChannelMixer,
        *,
        memory_mixer: TokenMixer | None = None,
        norm: Callable[..., nn.Module] = nn.RMSNorm,
        norm_eps: float = 1e-6,
        norm_order: NormOrder = "pre",
    ):
        super().__init__()
        check_sizes("Block", dims=dims)
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
                if norm_order != "none":
                    self[f"{name}_norm"] = norm(dims, eps=norm_eps)
                self[f"{name}_mixer"] = mixer
        self._is_post = norm_order == "post"
        self._dropout = 0.0

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> State:
        own = self.token_mixer.init_state(batch_size, dtype)
        if "memory_mixer" not in self:
            return own
        return own, self.memory_mixer.init_state(batch_size, dtype)

    def __call__(
        self, x: mx.array, state: State = None, context: Context | None = None, **arguments: Any
    ) -> tuple[mx.array, State]:
        """`context` is what all blocks share; `arguments`, as a lower bound, go to the token mixer."""
        context = Context() if context is None else context
        if "memory_mixer" not in self:
            x, state = self._mixed("token", x, state, context, **arguments)
        else:
            own, of_memory = (None, None) if state is None else state
            x, own = self._mixed("token", x, own, context.with_memory(None), **arguments)
            x, of_memory = self._mixed("memory", x, of_memory, context)
            state = own, of_memory
        # items, since attributes of a module are slow to find
        mixer = self["channel_mixer"]
        if self._is_post:
            return self["channel_norm"](self._dropped(x, mixer.residual(x, None))), state
        return self._dropped(x, mixer.residual(x, self.get("channel_norm"))), state

    def mixing_weights(
        self, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> dict[str, Callable[[], mx.array]]:
        """What gives the weights of "token" and "memory" mixer for the input of a call."""
        weights: dict[str, Callable[[], mx.array]]
        weights = {"token": partial(self._weights, "token", x, **arguments)}
        if "memory_mixer" in self:
            own = None if state is None else state[0]
            x, _ = self._mixed("token", x, own, context.with_memory(None), **arguments)
            weights["memory"] = partial(self._weights, "memory", x, memory=context.memory)
        return weights

    def _weights(self, name: str, x: mx.array, **arguments: Any) -> mx.array:
        norm = None if self._is_post else self.get(name + "_norm")
        mixer: TokenMixer = self[name + "_mixer"]
        return mixer.mixing_weights(x if norm is None else norm(x), **arguments)

    def _mixed(
        self, name: str, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> tuple[mx.array, State]:
        mixer: TokenMixer = self[name + "_mixer"]
        residual = mixer.residual
        if context.by_position and name == "token":
            residual = mixer.residual_by_position
        if self._is_post:
            y, state = residual(x, None, state, context, **arguments)
            return self[name + "_norm"](self._dropped(x, y)), state
        y, state = residual(x, self.get(name + "_norm"), state, context, **arguments)
        return self._dropped(x, y), state

    def _dropped(self, x: mx.array, y: mx.array) -> mx.array:
        """The sum `y`, without some elements of what was added to `x`."""
        if not (self._dropout and self.training):
            return y
        return x + nn.Dropout(self._dropout)(y - x)


def set_dropout(model: nn.Module, probability: float) -> int:
    r"""Sets, in place, with which probability training drops each element of what a mixer adds.

    .. math::
        y = x + \frac{m}{1 - p} \odot \mathrm{Mixer}(\mathrm{norm}(x)), \quad
        m_i \sim \mathrm{Bernoulli}(1 - p)

    takes the place of both sums of every `Block`. A model that does not train computes as before.
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
    blocks = [module for _, module in model.named_modules() if isinstance(module, Block)]
    for block in blocks:
        block._dropout = probability
    return len(blocks)
