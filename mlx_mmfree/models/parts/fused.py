"""Blocks of a model that runs: mixers together with the norms before them and the sums after them.

`fuse_operations` gives each block of a model its fused class, in place. No array and no name changes,
and linears may be replaced afterwards, by ones with adapters for instance: `layers.fusing` looks at what
is there in each call.

| in a block | becomes |
|---|---|
| norm, then the projections of a mixer | `fusing.fused_inputs` with the norm |
| gate or norm, linear of the result, sum with the residual stream | `fusing.finished` with all of them |
| sum, norm, rotated projections of the channel mixer | `fusing.inputs_of_sum` |
"""

from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from ...layers.context import Context
from ...layers.dense import Linear, QuantizedLinear
from ...layers.fusing import finished, fused_inputs, fuses, inputs_of_sum, variant_of
from ...layers.mixer import Mixer, State
from ...layers.norms import RMSNorm
from .block import Block
from .reversible import ReversibleBlock


class Fused(Block):
    """Base class of fused blocks: `branch` and `add` of a block, in few operations."""

    def add(
        self,
        name: str,
        x: mx.array,
        given: mx.array,
        state: State,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, State]:
        if self.norm_at(name, "branch") is not None or self.is_dropping or not fuses():
            return super().add(name, x, given, state, context, **arguments)
        y, state = self.branch(name, given, state, context, residual=x, **arguments)
        return self.normed(name, "after", y), state

    def branch(
        self,
        name: str,
        x: mx.array,
        state: State,
        context: Context,
        *,
        residual: mx.array | None = None,
        **arguments: Any,
    ) -> tuple[mx.array, State]:
        """The branch of a block, plus `residual`."""
        # each decoded token comes here twice for each block
        mixer: Mixer = self[f"{name}_mixer"]
        context = self.seen_by(name, context) if "memory_mixer" in self else context
        before = mixer.checked_state(x, state)
        if not (fuses() and mixer.is_cut(x, before, context)):
            y, state = super().branch(name, x, state, context, **arguments)
            return y if residual is None else residual + y, state
        linears = [mixer[each] for each in mixer.projections]
        dtype = None if mixer.keeps_float32 else x.dtype
        parts = fused_inputs(x, linears, self.norm_at(name, "before"), dtype)
        parts, state = mixer.between(parts, before, context, **arguments)
        return finished(mixer, parts, x.dtype, residual), state


class FusedBlock(Fused):
    """A `Block` in few operations."""

    def __call__(
        self, x: mx.array, state: State = None, context: Context | None = None, **arguments: Any
    ) -> tuple[mx.array, State]:
        if not (self._is_plain and fuses()):
            return super().__call__(x, state, context, **arguments)
        context = Context() if context is None else context
        channel = self["channel_mixer"]
        linears = [channel[each] for each in channel.projections]
        takes_sum = bool(linears) and variant_of(linears[0]).takes_sum
        if not (takes_sum and channel.is_cut(x, None, context)):
            x, state = self.branch("token", x, state, context, residual=x, **arguments)
            return self.branch("channel", x, None, context, residual=x)[0], state
        # the sum is left to what is before the projections
        branch, state = self.branch("token", x, state, context, **arguments)
        parts, x = inputs_of_sum(x, branch, linears, self["channel_norm"])
        return finished(channel, channel.between(parts, None, None)[0], x.dtype, x), state

    @property
    def _is_plain(self) -> bool:
        """True if it is two branches after norms, of which the first alone has a state."""
        names, carriers = self["_names"], self["carriers"]
        is_two = names == ("token", "channel") and len(carriers) == 1
        return is_two and self._order == "pre" and not self.is_dropping


class FusedReversibleBlock(Fused, ReversibleBlock):
    """A `ReversibleBlock` in few operations."""


Model = TypeVar("Model", bound=nn.Module)

_FAST: dict[type[nn.Module], type[nn.Module]] = {
    Block: FusedBlock,
    ReversibleBlock: FusedReversibleBlock,
    nn.Linear: Linear,
    nn.QuantizedLinear: QuantizedLinear,
    nn.RMSNorm: RMSNorm,
}


def fuse_operations(model: Model) -> Model:
    """Lets each block of a model compute in few operations, in place; returns the model.

    Linears and norms of MLX become the layers of `layers`, which have the same parameters.

    Results equal the definitions but for rounding: between a norm and the linears after it, a
    fused block may keep more bits.
    """
    for module in model.modules():
        kind = _FAST.get(type(module))
        if kind is not None:
            module.__class__ = kind
    return model
