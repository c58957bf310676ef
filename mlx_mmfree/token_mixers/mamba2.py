"""Mamba-2, a state space model with one decay for each head (Dao and Gu, arXiv 2405.21060)."""

import math
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes, dims_of_a_head
from ..layers.context import Context
from ..layers.delta_rule import fresh_decay_log, fresh_step_bias
from ..layers.dense import Linear
from ..layers.linear import split_heads
from ..layers.mixer import Linears, TokenMixer
from ..layers.norms import RMSNorm
from ..layers.recurrence import weights_of_recurrence
from ..layers.short_convolution import ShortConvolution
from ..ops import gated_linear_attention, rms_norm
from ..ops.activations import silu
from ..ops.gated_delta_net import softplus


class Mamba2State(NamedTuple):
    """The state of a `Mamba2`.

    Attributes:
        convolution: The last inputs of the convolution, `(B, K - 1, C)`.
        memory: The state of each head, float32 `(B, H, N, P)`.

    Example:
        >>> y, state = Mamba2(32)(mx.zeros((2, 5, 32)))
        >>> state.convolution.shape, state.memory.shape
        ((2, 3, 96), (2, 4, 16, 16))
    """

    convolution: mx.array
    memory: mx.array


class Mamba2(TokenMixer):
    r"""A state space model whose state is a matrix for each head and decays by a step of its own.

    .. math::
        [z_t, u_t, \delta_t] &= W_{in} x_t, \quad
        [v_t, b_t, c_t] = \mathrm{silu}(\mathrm{conv}(u)_t), \quad
        \Delta_t = \mathrm{softplus}(\delta_t + d) \\
        S_t &= e^{-\Delta_t e^{A}} S_{t-1} + \Delta_t\,b_t\,v_t^\top, \quad
        o_t = S_t^\top c_t + D\,v_t \\
        y_t &= W_{out}\,\mathrm{RMSNorm}(o_t \odot \mathrm{silu}(z_t))

    for each head, where heads of a group share :math:`b_t` and :math:`c_t`, and the channels of a group
    have a norm. The convolution is short and causal.

    Source: Dao and Gu, arXiv 2405.21060.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        head_dim: Dims `P` of a value. Default: `2 * dims / num_heads`.
        state_dims: Dims `N` of :math:`b_t` and :math:`c_t`.
        num_groups: Groups of heads.
        conv_size: Taps of the convolution.
        conv_bias: Whether it has a bias.
        min_step: The least :math:`\Delta_t`.
        max_step: The largest :math:`\Delta_t`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of the norm.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `Mamba2State`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims or the groups the heads, the
            limits of steps are out of order, or an input has other dims.

    Example:
        >>> y, state = Mamba2(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape
        ((1, 5, 32), (1, 4, 16, 16))
    """

    equation: ClassVar[str] = (
        "S_t = f_t S_(t-1) + b_t^T v_t, y_t = W norm((c_t S_t + D v_t) silu(z_t))"
    )
    complexity: ClassVar[str] = "T D N"
    paper: ClassVar[str] = "arXiv 2405.21060"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 4,
        head_dim: int | None = None,
        state_dims: int = 16,
        num_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        min_step: float = 0.0,
        max_step: float = math.inf,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_sizes("Mamba2", dims=dims, state_dims=state_dims, num_groups=num_groups)
        check_optional_sizes("Mamba2", head_dim=head_dim)
        head_dim = dims_of_a_head("Mamba2", 2 * dims, num_heads, head_dim)
        if num_heads % num_groups:
            raise ValueError(
                f"[Mamba2] 'num_groups' must divide 'num_heads', {num_heads}, but got {num_groups}."
            )
        if not 0 <= min_step <= max_step:
            raise ValueError(
                "[Mamba2] 'min_step' must be at least 0 and at most 'max_step' but got "
                f"{min_step} and {max_step}."
            )
        self._dims = dims
        self.num_heads = num_heads
        self._head_dim = head_dim
        self._num_groups = num_groups
        self._state_dims = state_dims
        self._limits = (min_step, max_step)
        self._hidden_dims = num_heads * head_dim
        channels = self._hidden_dims + 2 * num_groups * state_dims
        inner = {"input_proj": [self._hidden_dims, channels, num_heads]}
        self.make_projections(dims, inner, linear, bias=bias)
        self.short_conv = ShortConvolution(channels, conv_size, bias=conv_bias)
        self.decay_log = fresh_decay_log(num_heads)
        self.step_bias = fresh_step_bias(num_heads)
        self.skip = mx.ones((num_heads,))
        self.output_norm = RMSNorm(self._hidden_dims, eps=norm_eps)
        self.make_output(self._hidden_dims, dims, linear, bias=bias)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> Mamba2State:
        shape = (batch_size, self.num_heads, self._state_dims, self._head_dim)
        return Mamba2State(self.short_conv.init_state(batch_size, dtype), mx.zeros(shape))

    def mix(
        self,
        z: mx.array,
        channels: mx.array,
        steps: mx.array,
        state: Mamba2State,
        context: Context,
    ) -> tuple[mx.array, Mamba2State]:
        (c, b, v, f), last = self._heads(channels, steps, state.convolution, context)
        o, memory = gated_linear_attention(
            c, b, v, f, state.memory, valid=context.valid, starts=context.starts
        )
        o = o + self["skip"].astype(mx.float32)[:, None, None] * v
        return self._normed(o, z), Mamba2State(last, memory)

    def _normed(self, o: mx.array, z: mx.array) -> mx.array:
        """The norm of each group of channels of what was read, once it is gated, `(B, L, E)`."""
        y = mx.flatten(o.swapaxes(1, 2), 2) * silu(z.astype(mx.float32))
        norm = self["output_norm"]
        if self._num_groups == 1:
            return rms_norm(y, norm["weight"], eps=norm.eps)
        groups = mx.unflatten(y, -1, (self._num_groups, -1))
        return mx.flatten(rms_norm(groups, eps=norm.eps), 2) * norm["weight"].astype(mx.float32)

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("Mamba2", x, self._dims)
        before = self.init_state(x.shape[0], x.dtype).convolution
        _, channels, steps = self.apart(self.project(x))
        (c, b, _, f), _ = self._heads(channels, steps, before, Context())
        own = self["skip"].astype(mx.float32)[:, None, None] * mx.eye(x.shape[1])
        return weights_of_recurrence(c, b, f) + own

    def _heads(
        self, channels: mx.array, steps: mx.array, before: mx.array, context: Context
    ) -> tuple[tuple[mx.array, ...], mx.array]:
        """`c`, `b` times the step, `v` and the gates in heads, float32, and the last inputs."""
        channels, last = self["short_conv"](channels, before, context)
        shared = self._num_groups * self._state_dims
        cuts = [self._hidden_dims, self._hidden_dims + shared]
        v, b, c = mx.split(channels.astype(mx.float32), cuts, axis=-1)
        shares = self.num_heads // self._num_groups
        b, c = (mx.repeat(split_heads(part, self._num_groups), shares, axis=1) for part in (b, c))
        steps = softplus(steps.astype(mx.float32) + self["step_bias"].astype(mx.float32))
        steps = mx.clip(steps, *self._limits)
        f = mx.exp(-steps * mx.exp(self["decay_log"].astype(mx.float32)))
        steps, f = (split_heads(part, self.num_heads) for part in (steps, f))
        return (c, b * steps, split_heads(v, self.num_heads), f), last
