"""Ring attention: a sequence split over processes (Liu et al., arXiv 2310.01889)."""

from typing import Any, ClassVar

import mlx.core as mx

from ..layers.attention.mixer import SelfAttention, SelfAttentionState
from ..layers.attention.positions import RoPE
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import Linears, StatesByPosition
from ..ops.ring_attention import ring_attention


class RingAttention(SelfAttention):
    r"""Softmax attention of the part of a sequence that a process holds to the whole of it.

    .. math::
        y_t = W_o\,\Big[\sum_{j} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)
        \,v_{j,g(h)}\Big]_{h=1..H}

    Of `P` processes, number `r` is called with the `r`-th part of the sequence and returns that part of
    the result. Keys and values go round in a ring, so that a process needs memory for its own part and
    one other. The result equals ordinary attention over the whole, and so do the gradients of the
    inputs; the gradients of the weights are this process's share, whose sum over the processes is the
    whole.
    In a group of one process, which is the default, it is ordinary attention, with its state.

    While the sequence is split, it is read whole: there is no state to go on from, samples are not
    packed, and a call cannot be compiled. All processes make the same calls in the same order.

    Source: Liu et al., arXiv 2310.01889.

    Args:
        dims: Model dims `D`.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        rope: Rotates queries and keys by the positions in the whole text, made for `head_dim`.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.
        group: The processes among which sequences are split; `None`: this one alone.

    Shape:
        `x` and `y`: `(B, L, D)`, in a group parts of one length.

    State:
        `KeyValueState`, which stays empty in a group; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. Parts have different lengths, or what a group
            cannot do is asked of it.

    Example:
        >>> RingAttention(32)(mx.zeros((1, 5, 32)))[0].shape
        (1, 5, 32)
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V, keys passed round P processes"
    complexity: ClassVar[str] = "T^2 D / P for each process"
    paper: ClassVar[str] = "arXiv 2310.01889"
    partition = None

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        rope: RoPE | None = None,
        is_causal: bool = True,
        group: mx.distributed.Group | None = None,
    ):
        super().__init__(
            dims,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            linear=linear,
            bias=bias,
            rope=rope,
            is_causal=is_causal,
        )
        self._group = group if group is not None and group.size() > 1 else None

    def is_cut(self, x: mx.array, state: SelfAttentionState, context: Context) -> bool:
        return super().is_cut(x, state, context) and self._group is None

    def run(
        self, x: mx.array, state: SelfAttentionState, context: Context, **arguments: Any
    ) -> tuple[mx.array, SelfAttentionState | StatesByPosition]:
        if self._group is None:
            return super().run(x, state, context, **arguments)
        return self._read_part(x, state, context, self._group)

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        if self._group is not None:
            raise ValueError(
                "[RingAttention] has no weights that could be shown while the sequence is split over "
                f"{self._group.size()} processes. Without 'group' one process reads it all."
            )
        return super().mixing_weights(x, **arguments)

    def _read_part(
        self,
        x: mx.array,
        before: SelfAttentionState,
        context: Context,
        group: mx.distributed.Group,
    ) -> tuple[mx.array, SelfAttentionState]:
        for name, given in (
            ("state", getattr(before, "used", 0)),
            ("starts", context.starts is not None),
        ):
            if given:
                raise ValueError(
                    f"[RingAttention] '{name}' must be None where the sequence is split over "
                    f"{group.size()} processes. Without 'group' one process reads it all."
                )
        valid = context.valid
        if valid is not None:
            x = mx.where(valid[..., None], x, mx.zeros((), x.dtype))
        q, k, v = self.apart(self.project(x))
        q, k = split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads)
        v = split_heads(v, self.num_kv_heads)
        if "rope" in self:
            rotation = self.rope.rotation(self._offset(x.shape[1], valid, group), x.shape[1])
            q, k = self.rope.scaled(self.rope.rotate(q, rotation)), self.rope.rotate(k, rotation)
        y = ring_attention(q, k, v, group, is_causal=self.is_causal, valid=valid)
        y = self.finish(merge_heads(y), x.dtype)
        return y if valid is None else mx.where(valid[..., None], y, mx.zeros((), y.dtype)), before

    def _offset(
        self, length: int, valid: mx.array | None, group: mx.distributed.Group
    ) -> int | mx.array:
        """The position in the whole text of the first token or, with padding, of each, `(B, L)`."""
        if valid is None:
            return group.rank() * length
        own = mx.cumsum(valid.astype(mx.int32), axis=1)
        counts = mx.distributed.all_gather(own[None, :, -1], group=group)
        mx.eval(counts)
        before = counts[: group.rank()].sum(axis=0)
        return mx.maximum(before[:, None] + own - 1, 0)
