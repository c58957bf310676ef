"""The mixers of RWKV-7, whose state forgets by vectors of its own (Peng et al., arXiv 2503.14456)."""

import math
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import split_heads
from ..layers.mixer import Linears, TokenMixer, factory_of
from ..layers.short_convolution import shift_state, shifted
from ..ops import gated_delta_rule, layer_norm
from ..ops.activations import squared_relu
from ..ops.gated_delta_net import unit_length

_SHIFTS = ("query", "decay", "key", "value", "removal", "gate")


class RWKV7State(NamedTuple):
    """The state of an `RWKV7`.

    Attributes:
        shift: The last input, `(B, 1, D)`.
        memory: The state of each head, float32 `(B, H, K, K)`.

    Example:
        >>> y, state = RWKV7(32)(mx.zeros((2, 5, 32)))
        >>> state.shift.shape, state.memory.shape
        ((2, 1, 32), (2, 4, 8, 8))
    """

    shift: mx.array
    memory: mx.array


class RWKV7(TokenMixer):
    r"""A delta rule whose removal has vectors of its own and reads the state before it decays.

    .. math::
        z^c_t &= x_t + (x_{t-1} - x_t) \odot \mu_c, \quad
        r_t, k_t, v_t = W_r z^r_t, W_k z^k_t, W_v z^v_t \\
        f_t &= \exp(-e^{-1/2}\,\sigma(D_2 \tanh(D_1 z^d_t))), \quad
        a_t = \sigma(A_2 A_1 z^a_t), \quad g_t = G_2\,\sigma(G_1 z^g_t) \\
        \hat k_t &= \mathrm{unit}(k_t \odot \xi), \quad
        \tilde k_t = k_t \odot (1 + (a_t - 1) \odot \alpha) \\
        S_t &= \mathrm{diag}(f_t) S_{t-1} - (a_t \odot \hat k_t)(S_{t-1}^\top \hat k_t)^\top
        + \tilde k_t v_t^\top \\
        y_t &= W_o\,((\mathrm{norm}(S_t^\top r_t) + (r_t \odot \rho \cdot \tilde k_t)\,v_t) \odot g_t)

    for each head, with a norm of each head. With `mixes_values`, :math:`v_t` becomes
    :math:`v_t + (v^1_t - v_t) \odot \sigma(V_2 V_1 z^v_t)`, where :math:`v^1_t` is the value of the
    first layer, which that one hands on.

    Source: Peng et al., arXiv 2503.14456.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        mixes_values: Whether values are mixed with the first layer's, as in all other layers.
        decay_rank: Dims that :math:`D_1` maps to. Default: about `1.8 sqrt(D)`, a multiple of 32.
        removal_rank: Dims that :math:`A_1` maps to. Default: about `1.8 sqrt(D)`, a multiple of
            32.
        value_rank: Dims that :math:`V_1` maps to. Default: about `1.3 sqrt(D)`.
        gate_rank: Dims that :math:`G_1` maps to. Default: about `0.6 D^0.8`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each. :math:`D_1` is `decay_down_proj`,
            :math:`D_2` is `decay_proj`, and so on with `removal`, `value_mix` and `gate`.
        bias: Whether the projections to queries, keys, values and the output have a bias.
        norm_eps: Epsilon of the norm; as published, it is multiplied by the dims of a head.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `RWKV7State`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = RWKV7(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape
        ((1, 5, 32), (1, 4, 8, 8))
    """

    equation: ClassVar[str] = (
        "S_t = diag(f_t) S_(t-1) - (a_t u_t) (S_(t-1)^T u_t)^T + k_t v_t^T, "
        "y_t = W ((norm(S_t^T r_t) + (r_t k_t^T) v_t) g_t)"
    )
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2503.14456"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 4,
        mixes_values: bool = False,
        decay_rank: int | None = None,
        removal_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        self._head_dim = dims_of_a_head("RWKV7", dims, num_heads)
        check_optional_sizes(
            "RWKV7",
            decay_rank=decay_rank,
            removal_rank=removal_rank,
            value_rank=value_rank,
            gate_rank=gate_rank,
        )
        self._dims = dims
        self.num_heads = num_heads
        small = _rank(1.8 * dims**0.5)
        ranks = {
            "decay": decay_rank or small,
            "removal": removal_rank or small,
            "gate": gate_rank or _rank(0.6 * dims**0.8),
        }
        if mixes_values:
            ranks["value_mix"] = value_rank or _rank(1.3 * dims**0.5)
        # as in the published code, channels look back to different degrees
        share = mx.arange(dims) / dims
        for name in _SHIFTS:
            self[f"{name}_shift"] = (1.0 - share).reshape(1, 1, dims)
        for name in ("query", "key", "value"):
            self[f"{name}_proj"] = factory_of(linear, f"{name}_proj")(dims, dims, bias=bias)
        self.make_output(dims, dims, linear, bias=bias)
        for name, rank in ranks.items():
            down = factory_of(linear, f"{name}_down_proj")
            self[f"{name}_down_proj"] = down(dims, rank, bias=False)
            up = factory_of(linear, f"{name}_proj")
            self[f"{name}_proj"] = up(rank, dims, bias=name != "gate")
        self.key_scale = mx.full((dims,), 0.85)
        self.removal_share = mx.ones((dims,))
        self.bonus = mx.zeros((num_heads, self._head_dim))
        eps = self._head_dim * norm_eps
        self.output_norm = nn.GroupNorm(num_heads, dims, eps=eps, pytorch_compatible=True)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> RWKV7State:
        shape = (batch_size, self.num_heads, self._head_dim, self._head_dim)
        return RWKV7State(shift_state(batch_size, self._dims, dtype), mx.zeros(shape))

    def mix(self, x: mx.array, state: RWKV7State, context: Context) -> tuple[mx.array, RWKV7State]:
        (r, k, v, f, removal), gate, last = self._inner(x, state.shift, context)
        o, memory = gated_delta_rule(
            r,
            k,
            v,
            None,
            f,
            state.memory,
            removal=removal,
            valid=context.valid,
            starts=context.starts,
        )
        own = (r * k * self["bonus"].astype(mx.float32)[:, None]).sum(axis=-1, keepdims=True) * v
        return self._normed(o, own) * gate.astype(mx.float32), RWKV7State(last, memory)

    def _normed(self, o: mx.array, own: mx.array) -> mx.array:
        """The norm of each head of what was read, and what a position reads from itself, `(B, L, D)`."""
        norm = self["output_norm"]
        o, own = (x.swapaxes(1, 2) for x in (o, own))
        y = mx.flatten(layer_norm(o, None, None, eps=norm.eps), 2)
        return y * norm["weight"].astype(mx.float32) + norm["bias"] + mx.flatten(own, 2)

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("RWKV7", x, self._dims)
        before = self.init_state(x.shape[0], x.dtype).shift
        (r, k, _, f, removal), _, _ = self._inner(x, before, Context())
        batch, heads, length, dims = r.shape
        values = mx.broadcast_to(mx.eye(length), (batch, heads, length, length))
        memory = mx.zeros((batch, heads, dims, length))
        return gated_delta_rule(r, k, values, None, f, memory, removal=removal)[0]

    def _inner(
        self, x: mx.array, before: mx.array, context: Context
    ) -> tuple[tuple[Any, ...], mx.array, mx.array]:
        """The arguments of the rule in heads, float32, the output's gate, and the last input."""
        previous, last = shifted(x, before, context)
        step = previous - x
        inputs = {name: x + step * self[f"{name}_shift"].astype(x.dtype) for name in _SHIFTS}
        r, k, v = (
            self[f"{name}_proj"](inputs[name]).astype(mx.float32)
            for name in ("query", "key", "value")
        )
        first = context.cross_layer.setdefault("first_value", v)
        if "value_mix_proj" in self:
            v = v + (first - v) * mx.sigmoid(self._low_rank("value_mix", inputs["value"]))
        f = mx.tanh(self["decay_down_proj"](inputs["decay"]))
        f = mx.sigmoid(self["decay_proj"](f).astype(mx.float32))
        a = mx.sigmoid(self._low_rank("removal", inputs["removal"]))
        gate = self["gate_proj"](mx.sigmoid(self["gate_down_proj"](inputs["gate"])))
        unit = k * self["key_scale"].astype(mx.float32)
        k = k * (1.0 + (a - 1.0) * self["removal_share"].astype(mx.float32))
        f = mx.exp(-math.exp(-0.5) * f)
        r, k, v, f, a, unit = (split_heads(part, self.num_heads) for part in (r, k, v, f, a, unit))
        unit = unit_length(unit)
        return (r, k, v, f, (unit, a * unit)), gate, last

    def _low_rank(self, name: str, x: mx.array) -> mx.array:
        y: mx.array = self[f"{name}_proj"](self[f"{name}_down_proj"](x))
        return y.astype(mx.float32)


def _rank(about: float) -> int:
    return max(32, 32 * round(about / 32))


class RWKV7Channel(TokenMixer):
    r"""Two projections with a squared ReLU between them, of a position and the one before.

    .. math::
        y_t = W_v\,\mathrm{relu}(W_k\,(x_t + (x_{t-1} - x_t) \odot \mu))^2

    It stands in a block in the place of a channel mixer.

    Source: Peng et al., arXiv 2503.14456.

    Args:
        dims: Model dims `D`.
        hidden_dims: Channels between the projections. Default: `4 * dims`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        The last input, `(B, 1, D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> y, state = RWKV7Channel(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.shape
        ((1, 5, 32), (1, 1, 32))
    """

    name: ClassVar[str] = "rwkv7_channel"
    equation: ClassVar[str] = "y_t = W relu(K (x_t + (x_(t-1) - x_t) m))^2"
    complexity: ClassVar[str] = "T D^2"
    paper: ClassVar[str] = "arXiv 2503.14456"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
    ):
        super().__init__()
        check_sizes("RWKV7Channel", dims=dims)
        check_optional_sizes("RWKV7Channel", hidden_dims=hidden_dims)
        hidden_dims = 4 * dims if hidden_dims is None else hidden_dims
        self._dims = dims
        self.shift = 1.0 - mx.arange(dims) / dims
        self.key_proj = factory_of(linear, "key_proj")(dims, hidden_dims, bias=bias)
        self.make_output(hidden_dims, dims, linear, bias=bias, name="value_proj")

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> mx.array:
        return shift_state(batch_size, self._dims, dtype)

    def mix(self, x: mx.array, state: mx.array, context: Context) -> tuple[mx.array, mx.array]:
        previous, last = shifted(x, state, context)
        key = self["key_proj"](x + (previous - x) * self["shift"].astype(x.dtype))
        return squared_relu(key), last
