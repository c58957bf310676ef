"""Attention whose query heads share keys, to all tokens (arXiv 2305.13245) or to some of them."""

from typing import ClassVar

import mlx.core as mx

from ..layers.arguments import check_counts, check_optional_sizes, check_sizes
from ..layers.attention.mixer import SelfAttention
from ..layers.attention.options import KeyValueCache
from ..layers.attention.positions import PositionBias, RoPE
from ..layers.dense import Linear
from ..layers.mixer import Linears
from ..ops import attention
from ..ops.attention import Mask


class GQA(SelfAttention):
    r"""Softmax attention whose query heads share fewer key and value heads.

    .. math::
        y_t = W_o\,\Big[\sum_{j} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)\,
        v_{j,g(h)}\Big]_{h=1..H}, \quad g(h) = \lfloor h\,G / H \rfloor

    With one key head this is multi-query attention (arXiv 1911.02150), with as many as query heads
    ordinary multi-head attention.

    Source: Ainslie et al., arXiv 2305.13245.

    Args:
        dims: Model dims `D`.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        output_bias: Whether the output projection has one. Default: `bias`.
        is_stacked: One projection, `qkv_proj`, gives queries, keys and values one after the other.
        is_gated: Each head of queries comes with a gate as wide from the same projection, and what the
            head reads is multiplied by its sigmoid (Qiu et al., arXiv 2505.06708).
        rope: Rotates queries and keys, made for `head_dim` or for its first dims; `None`: it does not.
        position_bias: Adds a term to the scores by the distance, made for `num_heads`.
        norms: The norms inside.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.
        cache: Which tokens are seen, and how their keys and values are stored.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState`, or in `fixed_state` a `FixedKeyValueState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = GQA(32, num_heads=4, num_kv_heads=2)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.positions.tolist()
        ((1, 5, 32), [[0, 1, 2, 3, 4]])
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V, keys shared by query heads"
    complexity: ClassVar[str] = "T^2 D"
    paper: ClassVar[str] = "arXiv 2305.13245"


class SlidingWindowAttention(GQA):
    r"""Softmax attention in which each token sees only those nearer than a window.

    .. math::
        y_t = W_o\,\Big[\sum_{j \in N(t)} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)
        \,v_{j,g(h)}\Big]_{h=1..H}, \quad N(t) = \{j : t - W < j \le t\}

    or, if it is not causal, :math:`N(t) = \{j : |t - j| < W\}`. A token counts itself, as in Mistral;
    other code counts otherwise: `window_size=(W - 1, 0)` of flash-attention and `sliding_window = W` of
    Mistral are `window=W` here, and `attention_window` of a Longformer is :math:`2(W - 1)`. Depth `N`
    reaches back `N (W - 1)` tokens. Tokens are read in chunks or blocks, so that time and memory grow
    with `L W`, and a state is a ring of `W` keys and values. It is `GQA` with this window.

    Sources: Beltagy et al., arXiv 2004.05150; Jiang et al., arXiv 2310.06825.

    Args:
        dims: Model dims `D`.
        window: Tokens `W` that are seen, on each side if not causal, each time with the token itself.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        rope: Rotates queries and keys by the positions in the text, made for `head_dim`.
        position_bias: Adds a term to the scores by the distance, made for `num_heads`.
        is_causal: The window lies before a token; otherwise on both sides.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState`, or in `fixed_state` a `FixedKeyValueState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> mixer = SlidingWindowAttention(32, window=4)
        >>> y, state = mixer(mx.zeros((1, 9, 32)))
        >>> y.shape, sorted(state.positions[0].tolist())
        ((1, 9, 32), [5, 6, 7, 8])
    """

    name: ClassVar[str] = "sliding_window_attention"
    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V, over the last W keys"
    complexity: ClassVar[str] = "T W D"
    paper: ClassVar[str] = "arXiv 2004.05150"

    def __init__(
        self,
        dims: int,
        *,
        window: int = 256,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        is_causal: bool = True,
    ):
        check_sizes("SlidingWindowAttention", window=window)
        super().__init__(
            dims,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            linear=linear,
            bias=bias,
            rope=rope,
            position_bias=position_bias,
            is_causal=is_causal,
            cache=KeyValueCache(window),
        )


class LocalAttention(GQA):
    r"""Softmax attention in which each token sees its block and the blocks beside it.

    .. math::
        y_t = W_o\,\Big[\sum_{j \in N(t)} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)
        \,v_{j,g(h)}\Big]_{h=1..H}, \quad
        N(t) = \{j \le t : \lfloor j / S \rfloor \ge \lfloor t / S \rfloor - n\}

    or, if it is not causal, :math:`N(t) = \{j : |\lfloor j / S \rfloor - \lfloor t / S \rfloor| \le n\}`
    with blocks of `S` tokens and `n` neighbours. How far a token sees depends on its position in its
    block: in causal attention from `n S + 1` to `(n + 1) S` tokens, itself included. The package
    local-attention has a mode of exact windows; that is `SlidingWindowAttention` with a window of
    `S + 1`. A sequence need not consist of whole blocks; beyond its ends there is nothing to be seen.
    Blocks are counted from the first token of a sample.

    Sources: Parmar et al., arXiv 1802.05751; Roy et al., arXiv 2003.05997.

    Args:
        dims: Model dims `D`.
        block_size: Tokens `S` of a block.
        neighbours: Blocks `n` that are seen before the own one, and after it if it is not causal.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        rope: Rotates queries and keys by the positions in the text, made for `head_dim`.
        position_bias: Adds a term to the scores by the distance, made for `num_heads`.
        is_causal: A token sees no later ones.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState` of the last `(n + 1) S` tokens; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> mixer = LocalAttention(32, block_size=4)
        >>> y, state = mixer(mx.zeros((1, 9, 32)))
        >>> y.shape, state.used
        ((1, 9, 32), 8)
    """

    name: ClassVar[str] = "local_attention"
    equation: ClassVar[str] = (
        "y = softmax(Q K^T / sqrt(d)) V, over the own block and its neighbours"
    )
    complexity: ClassVar[str] = "T S D"
    paper: ClassVar[str] = "arXiv 1802.05751"

    def __init__(
        self,
        dims: int,
        *,
        block_size: int = 128,
        neighbours: int = 1,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        is_causal: bool = True,
    ):
        check_sizes("LocalAttention", block_size=block_size)
        check_counts("LocalAttention", neighbours=neighbours)
        cache = KeyValueCache((neighbours + 1) * block_size, step=block_size)
        super().__init__(
            dims,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            linear=linear,
            bias=bias,
            rope=rope,
            position_bias=position_bias,
            is_causal=is_causal,
            cache=cache,
        )


class AttentionSink(GQA):
    r"""Causal attention with a sink for weight that no token deserves.

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

    name: ClassVar[str] = "attention_sink"
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
        linear: Linears = Linear,
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
            self.sink_logits = mx.zeros((self.num_heads,))
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
