"""The common parts of mixers with the delta rule: convolutions, heads, reading and writing."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..ops import gated_delta_rule
from ..ops.gated_delta_net import HeadSizes, convolved_heads
from .arguments import check_sequences, check_sizes
from .context import Context
from .linear import split_heads
from .mixer import Linears, TokenMixer
from .norms import RMSNorm
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
        caller = type(self).__name__
        check_sizes(
            caller,
            dims=dims,
            num_heads=num_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=conv_size,
        )
        if num_value_heads % num_heads:
            raise ValueError(
                f"[{caller}] 'num_value_heads' must be a multiple of 'num_heads', {num_heads}, but got "
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
        for name, width in widths.items():
            own = [keys, keys, values] if name == "qkv" else [width]
            self.make_projections(dims, {f"{name}_proj": own}, linear, bias=bias)
            self[f"{name}_conv"] = ShortConvolution(width, conv_size)
        self.make_projections(dims, {"beta_proj": [num_value_heads]}, linear, bias=bias)
        self.output_norm = RMSNorm(value_dim, eps=norm_eps)
        output = "out_proj" if is_stacked else "output_proj"
        self.make_output(values, dims, linear, bias=bias, name=output)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> DeltaRuleState:
        taps = self[f"{self._inner[0]}_conv"].weight.shape[-1]
        sizes = self._sizes
        shape = (batch_size, sizes.heads, sizes.key_dim, sizes.value_dim)
        inputs = mx.zeros((batch_size, taps - 1, sizes.channels), dtype)
        return DeltaRuleState(inputs, mx.zeros(shape))

    def taps(self) -> mx.array:
        """The taps of the convolutions of queries, keys and values, `(C, 1, T)`."""
        taps = [self[f"{name}_conv"]["weight"] for name in self._inner]
        return taps[0] if len(taps) == 1 else mx.concatenate(taps)

    def convolved(
        self, q: mx.array, k: mx.array, v: mx.array, state: DeltaRuleState, context: Context
    ) -> tuple[tuple[mx.array, ...], mx.array]:
        """Queries, keys and values in heads, `(B, H, L, K)`, and the convolutions' last inputs."""
        both, last = convolve(
            mx.concatenate([q, k, v], axis=-1), self.taps(), state.convolution, context
        )
        return convolved_heads(both, self._sizes), last

    steps: Callable[..., tuple[mx.array, mx.array | None]]
    """The write strength and the gates of each position, of the arguments of `mix` after values.

    Returns:
        Beta, float32 `(B, H, L, 1)`, and the gates of the state, float32 `(B, H, L, K)` or
        `(B, H, L, 1)`, or `None`.
    """

    def beta(self, b: mx.array) -> mx.array:
        """Beta of its projection's result, `(B, L, H)`."""
        return split_heads(mx.sigmoid(b.astype(mx.float32)) * self._sizes.max_beta, self.num_heads)

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        steps: tuple[mx.array, mx.array | None],
        state: DeltaRuleState,
        context: Context,
    ) -> tuple[mx.array, DeltaRuleState]:
        """The result of each position, read of the state, float32 `(B, L, H, V)`, and the new state."""
        (q, k, v), last = self.convolved(q, k, v, state, context)
        o, memory = gated_delta_rule(
            q, k, v, *steps, state.memory, valid=context.valid, starts=context.starts
        )
        return o.swapaxes(1, 2), DeltaRuleState(last, memory)

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences(type(self).__name__, x, self._dims)
        q, k, v, *others = self.apart(self.project(x))
        state = self.init_state(x.shape[0], x.dtype)
        (q, k, _), _ = self.convolved(q, k, v, state, Context())
        batch, length = x.shape[:2]
        values = mx.broadcast_to(mx.eye(length), (batch, self.num_heads, length, length))
        memory = mx.zeros((batch, self.num_heads, self._sizes.key_dim, length))
        return gated_delta_rule(q, k, values, *self.steps(*others), memory)[0]
