"""Attention by ReLU (Wortsman et al., arXiv 2309.08586; ReLA, Zhang et al., arXiv 2104.07012)."""

from copy import copy
from typing import Any, ClassVar, Literal, get_args

import mlx.core as mx
import mlx.nn as nn

from ..layers.attention.mixer import SelfAttention, SelfAttentionState
from ..layers.attention.options import KeyValueCache
from ..layers.attention.positions import PositionBias, RoPE
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.mixer import Linears
from ..ops import long_sum
from ..ops.attention import Mask

Normalization = Literal["length", "gated_norm", "none"]

QUERY_BLOCK = 256
"""Queries whose weights are alive at once."""


class GatedNorm(nn.Module):
    r"""RMSNorm with a gate of its own.

    .. math::
        y = \frac{x}{\max(\sqrt{\mathrm{mean}(x^2)}, \epsilon)} \odot g \odot \sigma(w \odot x)

    Args:
        dims: Dims of `x`.
        eps: :math:`\epsilon`.
    """

    def __init__(self, dims: int, *, eps: float = 1e-8):
        super().__init__()
        self._eps = eps
        self.weight = mx.ones((dims,))
        self.gate = mx.ones((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        y = x.astype(mx.float32)
        # the root only above epsilon, since its slope at 0 is infinite
        square = long_sum(y * y, axis=-1)[..., None] / y.shape[-1]
        rms = mx.sqrt(mx.maximum(square, self._eps**2))
        return (y / rms * self.weight * mx.sigmoid(y * self.gate)).astype(x.dtype)


class ReLUAttention(SelfAttention):
    r"""Attention whose weights are no softmax, but rectified scores.

    .. math::
        o_{t,h} = \frac{1}{n_t} \sum_{j} \mathrm{relu}\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)^p
        \,v_{j,g(h)}, \quad y_t = W_o\,[o_{t,h}]_{h=1..H}

    Weights are sparse and need no maximum of a row. :math:`n_t` is the number of tokens that token t
    sees, padding left out. The paper divides by the length; it has no rule for causal attention, where
    :math:`n_t` keeps the scale. ReLA has no divisor: a gated norm of each head's result keeps the scale,
    and another stands before the projections, as in the published code; both are gated by what they
    norm. Without either, results grow with the length.

    Sources: Wortsman et al., arXiv 2309.08586; ReLA, Zhang et al., arXiv 2104.07012.

    Args:
        dims: Model dims `D`.
        normalization: "length" for the divisor, "gated_norm" for ReLA, or "none".
        power: :math:`p`, 1 or 2.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether queries, keys and values are projected with a bias.
        output_bias: Whether the output is. Default: `bias`.
        rope: Rotates queries and keys, made for `head_dim`; `None`: it does not.
        position_bias: Adds a term to the scores by the distance, made for `num_heads`.
        norm_eps: :math:`\epsilon` of the gated norms.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.
        cache: Which tokens are seen, and how their keys and values are stored.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The normalization is unknown, or the power is
            neither 1 nor 2.

    Example:
        >>> y, state = ReLUAttention(32, num_heads=4)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.positions.tolist()
        ((1, 5, 32), [[0, 1, 2, 3, 4]])
    """

    equation: ClassVar[str] = "y_t = 1/n_t sum_j relu(q_t k_j^T / sqrt(d)) v_j"
    complexity: ClassVar[str] = "T^2 D"
    paper: ClassVar[str] = "arXiv 2309.08586"
    has_plain_weights = False

    def __init__(
        self,
        dims: int,
        *,
        normalization: Normalization = "length",
        power: int = 1,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        output_bias: bool | None = None,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        norm_eps: float = 1e-8,
        is_causal: bool = True,
        cache: KeyValueCache = KeyValueCache(),  # noqa: B008 (frozen)
    ):
        if normalization not in get_args(Normalization):
            known = ", ".join(map(repr, get_args(Normalization)))
            raise ValueError(
                f"[ReLUAttention] 'normalization' must be one of {known} but got {normalization!r:.80}."
            )
        if power not in (1, 2):
            raise ValueError(f"[ReLUAttention] 'power' must be 1 or 2 but got {power!r:.80}.")
        super().__init__(
            dims,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            linear=linear,
            bias=bias,
            output_bias=output_bias,
            rope=rope,
            position_bias=position_bias,
            is_causal=is_causal,
            cache=cache,
        )
        self._power = power
        self._divides = normalization == "length"
        self.prepares = normalization == "gated_norm"
        if self.prepares:
            self.input_norm = GatedNorm(dims, eps=norm_eps)
            self.head_norm = GatedNorm(self.head_dim, eps=norm_eps)

    def prepare(
        self, x: mx.array, state: SelfAttentionState, context: Context
    ) -> tuple[mx.array, SelfAttentionState]:
        return self.input_norm(x), state

    def weigh(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: Mask,
        bias: mx.array | None,
    ) -> mx.array:
        length, count = queries.shape[2], keys.shape[2]
        parts = []
        for start in range(0, length, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, length)
            # under a causal mask, the keys after the queries are left out
            seen = count - length + stop if isinstance(mask, str) else count
            rows: mx.array | None
            if isinstance(mask, str):
                rows = mx.arange(seen) <= mx.arange(seen - stop + start, seen)[:, None]
            else:
                rows = _rows(mask, start, seen)
            parts.append(
                self._weigh_block(
                    queries[:, :, start:stop],
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    rows,
                    _rows(bias, start, seen),
                )
            )
        y = mx.concatenate(parts, axis=2) if parts else queries
        return self.head_norm(y) if "head_norm" in self else y

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        plain = copy(self)
        plain.pop("head_norm", None)
        return super(ReLUAttention, plain).mixing_weights(x, **arguments)

    def _weigh_block(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array | None,
        bias: mx.array | None,
    ) -> mx.array:
        """The sum of some queries, float32 `(B, H, L, V)`."""
        groups, scale = keys.shape[1], queries.shape[-1] ** -0.5
        q = mx.unflatten(queries.astype(mx.float32) * scale, 1, (groups, -1))
        k, v = (x.astype(mx.float32)[:, :, None] for x in (keys, values))
        scores = q @ k.swapaxes(-1, -2)
        if bias is not None:
            scores = scores + (
                bias[:, None] if bias.shape[1] == 1 else mx.unflatten(bias, 1, (groups, -1))
            )
        weights = mx.maximum(scores, 0.0) ** self._power
        count = mx.array(float(keys.shape[2]))
        if mask is not None:
            mask = mask if mask.ndim < 4 else mask[:, None]
            weights = mx.where(mask, weights, 0.0)
            count = mx.maximum(mask.astype(mx.float32).sum(axis=-1, keepdims=True), 1.0)
        y = weights @ v
        return mx.flatten(y / count if self._divides else y, 1, 2)


def _rows(scores: mx.array | None, start: int, seen: int) -> mx.array | None:
    """The rows of a block of queries, where they differ, and the columns of the first keys."""
    if scores is None or scores.ndim < 2:
        return scores
    if scores.shape[-2] > 1:
        scores = scores[..., start : start + QUERY_BLOCK, :]
    return scores[..., :seen]
