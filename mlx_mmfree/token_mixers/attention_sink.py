"""Attention sinks: first tokens that stay (Xiao et al., arXiv 2309.17453), or learned logits."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..layers.arguments import check_counts, check_optional_sizes
from ..layers.attention.mixer import SelfAttention
from ..layers.attention.options import KeyValueCache
from ..layers.attention.positions import PositionBias, RoPE
from ..layers.mixer import Linears
from ..ops import attention
from ..ops.attention import Mask


class AttentionSink(SelfAttention):
    r"""Causal attention with a place for weight that no token deserves.

    .. math::
        y_t = W_o\,\Big[\sum_{j \in N(t)} \frac{e^{a_{t,j,h}}}{e^{s_h} + \sum_{i \in N(t)} e^{a_{t,i,h}}}
        \,v_{j,g(h)}\Big]_{h=1..H}, \quad a_{t,j,h} = q_{t,h}^\top k_{j,g(h)} / \sqrt{K}

    Streaming sinks are the first tokens of a text: :math:`N(t)` holds the first `sinks` and the last
    `window` tokens, so that a text can go on for ever. Positions are those inside that cache: the sinks
    look as near as if the text between had never been. It keeps a model fluent; what it has forgotten
    stays forgotten. Learned sinks are the logits :math:`s_h` of the denominator, one for each query
    head, as in gpt-oss; without them the term is missing. Both can be had at once.

    Source: Xiao et al., arXiv 2309.17453.

    Args:
        dims: Model dims `D`.
        window: Last tokens that are seen, the token itself included; `None`: all.
        sinks: First tokens that are seen beside the window.
        is_learned: Whether there are learned logits.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        rope: Rotates queries and keys, made for `head_dim`; `None`: it does not.
        position_bias: Adds a term to the scores by the distance, made for `num_heads`.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState`, or in `fixed_state` a `FixedKeyValueState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, an input has other dims,
            or there are sinks without a window.

    Example:
        >>> mixer = AttentionSink(32, window=4, sinks=2)
        >>> y, state = mixer(mx.zeros((1, 9, 32)))
        >>> y.shape, sorted(state.positions[0].tolist())
        ((1, 9, 32), [0, 1, 5, 6, 7, 8])
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V, over the first S and the last W keys"
    complexity: ClassVar[str] = "T (S + W) D"
    paper: ClassVar[str] = "arXiv 2309.17453"
    bidirectional: ClassVar[bool] = False

    def __init__(
        self,
        dims: int,
        *,
        window: int | None = 1024,
        sinks: int = 4,
        is_learned: bool = False,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = nn.Linear,
        bias: bool = False,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
    ):
        check_optional_sizes("AttentionSink", window=window)
        check_counts("AttentionSink", sinks=sinks)
        if sinks and window is None:
            raise ValueError(
                f"[AttentionSink] 'sinks' must be 0 without a 'window', which sees all, but got {sinks}."
            )
        super().__init__(
            dims,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            linear=linear,
            bias=bias,
            rope=rope,
            position_bias=position_bias,
            cache=KeyValueCache(window, sinks),
        )
        if is_learned:
            self.sink_logits = mx.zeros((num_heads,))
            self.has_plain_weights = False

    def weigh(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: Mask,
        bias: mx.array | None,
    ) -> mx.array:
        return attention(queries, keys, values, mask, bias=bias, sinks=self.get("sink_logits"))
