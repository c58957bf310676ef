"""The common parts of mixers with the delta rule: convolutions, heads, reading and writing."""

import math
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..ops import gated_delta_rule, gated_rms_norm, rms_norm
from ..ops.gated_delta_net import HeadSizes, convolved_heads
from .arguments import check_sequences, check_sizes
from .context import Context
from .linear import project, split_heads
from .mixer import Linears, StatesByPosition, TokenMixer, factory_of
from .short_convolution import ShortConvolution, convolve


class DeltaRuleState(NamedTuple):
    """The state of a mixer with the delta rule.

    Attributes:
        convolution: The last inputs of the convolutions of queries, keys and values, which lie side by
            side, `(B, K - 1, C)`.
        memory: The recurrent state of each head, float32 `(B, H, K, V)`.

    Example:
        >>> from mlx_mmfree.token_mixers import DeltaNet
        >>> y, state = DeltaNet(32)(mx.zeros((2, 5, 32)))
        >>> state.convolution.shape, state.memory.shape
        ((2, 3, 96), (2, 4, 8, 8))
    """

    convolution: mx.array
    memory: mx.array


def fresh_decay_log(count: int) -> mx.array:
    """Logarithms of decay rates of 1 to 16, `(count,)`, as Mamba-2 draws them."""
    return mx.log(mx.random.uniform(1.0, 16.0, (count,)))


def fresh_step_bias(count: int) -> mx.array:
    """Numbers that `softplus` maps to steps of 0.001 to 0.1, `(count,)`, as Mamba-2 draws them."""
    steps = mx.exp(mx.random.uniform(math.log(1e-3), math.log(1e-1), (count,)))
    return steps + mx.log(-mx.expm1(-steps))


class DeltaRuleMixer(TokenMixer):
    """A mixer of heads whose state is led by the delta rule; a subclass gives its gates and output.

    Args:
        dims: Model dims.
        num_heads: Heads of queries and keys.
        num_value_heads: Heads of values and states, a multiple of `num_heads`.
        key_dim: Dims of a key.
        value_dim: Dims of a value.
        conv_size: Taps of the convolutions.
        max_beta: The most that is replaced, 1, or 2 with which eigenvalues of the state's transition
            may be negative.
        linear: Makes a projection.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of the output's norm.
        is_stacked: One projection, `qkv_proj`, gives queries, keys and values one after the other, and
            one convolution, `qkv_conv`, reads them. The last projection is then called `out_proj`, by
            which names tell such a mixer from attention.
    """

    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_size: int,
        max_beta: int,
        linear: Linears,
        bias: bool,
        norm_eps: float,
        is_stacked: bool = False,
    ):
        super().__init__()
        place = type(self).__name__
        check_sizes(
            place,
            dims=dims,
            num_heads=num_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=conv_size,
        )
        if num_value_heads % num_heads:
            raise ValueError(
                f"[{place}] 'num_value_heads' must be a multiple of 'num_heads', {num_heads}, but got "
                f"{num_value_heads}."
            )
        self._dims = dims
        self.num_heads = num_value_heads
        self._sizes = HeadSizes(num_heads, num_value_heads, key_dim, value_dim, max_beta)
        keys, values = num_heads * key_dim, num_value_heads * value_dim
        widths = {"query": keys, "key": keys, "value": values}
        if is_stacked:
            widths = {"qkv": sum(widths.values())}
        self._inner = tuple(widths)
        self.shared_inputs = tuple(f"{name}_proj" for name in widths)
        for name, width in widths.items():
            self[f"{name}_proj"] = factory_of(linear, f"{name}_proj")(dims, width, bias=bias)
            self[f"{name}_conv"] = ShortConvolution(width, conv_size)
        self.beta_proj = factory_of(linear, "beta_proj")(dims, num_value_heads, bias=bias)
        self.output_norm = nn.RMSNorm(value_dim, eps=norm_eps)
        self._output = "out_proj" if is_stacked else "output_proj"
        self[self._output] = factory_of(linear, self._output)(values, dims, bias=bias)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> DeltaRuleState:
        taps = self[f"{self._inner[0]}_conv"].weight.shape[-1]
        sizes = self._sizes
        shape = (batch_size, sizes.heads, sizes.key_dim, sizes.value_dim)
        inputs = mx.zeros((batch_size, taps - 1, sizes.channels), dtype)
        return DeltaRuleState(inputs, mx.zeros(shape))

    def gates(self, x: mx.array) -> mx.array | None:
        """The gates of the state, float32 `(B, H, L, K)` or `(B, H, L, 1)`; `None`: there are none."""
        return None

    def finish(self, o: mx.array, x: mx.array) -> mx.array:
        """The norm and the gate, applied to what was read, both `(B, L, H, V)`, float32."""
        norm = self["output_norm"]
        return rms_norm(o, norm["weight"], eps=norm.eps)

    def mix(
        self, x: mx.array, state: DeltaRuleState, context: Context
    ) -> tuple[mx.array, DeltaRuleState | StatesByPosition]:
        (q, k, v, beta, f), last = self.inner(x, state, context)
        o, memory = gated_delta_rule(
            q, k, v, beta, f, state.memory, valid=context.valid, starts=context.starts
        )
        y = mx.flatten(self.finish(o.swapaxes(1, 2), x), 2).astype(x.dtype)
        return project(y, (self[self._output],)), DeltaRuleState(last, memory)

    def taps(self) -> mx.array:
        """Those of the convolutions of queries, keys and values, `(C, 1, T)`."""
        taps = [self[f"{name}_conv"]["weight"] for name in self._inner]
        return taps[0] if len(taps) == 1 else mx.concatenate(taps)

    def inner(
        self, x: mx.array, state: DeltaRuleState, context: Context
    ) -> tuple[tuple[Any, ...], mx.array]:
        """The arguments of the rule before its state, in heads, and the convolutions' last inputs."""
        parts = project(x, tuple(self[f"{name}_proj"] for name in self._inner))
        parts, last = convolve(parts, self.taps(), state.convolution, context)
        q, k, v = convolved_heads(parts, self._sizes)
        beta = mx.sigmoid(self["beta_proj"](x).astype(mx.float32)) * self._sizes.max_beta
        return (q, k, v, split_heads(beta, self.num_heads), self.gates(x)), last

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences(type(self).__name__, x, self._dims)
        state = self.init_state(x.shape[0], x.dtype)
        (q, k, _, beta, f), _ = self.inner(x, state, Context())
        batch, length = x.shape[:2]
        values = mx.broadcast_to(mx.eye(length), (batch, self.num_heads, length, length))
        memory = mx.zeros((batch, self.num_heads, self._sizes.key_dim, length))
        return gated_delta_rule(q, k, values, beta, f, memory)[0]


def gated_output(norm: nn.Module, o: mx.array, gate: mx.array) -> mx.array:
    """The norm of what was read, times the swish of a gate `(B, L, H V)`; `(B, L, H, V)`."""
    gate = mx.unflatten(gate, -1, o.shape[2:])
    y: mx.array = gated_rms_norm(o, gate, norm["weight"], eps=norm.eps)
    return y
