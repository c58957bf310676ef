"""Attention to what is near (Beltagy et al., arXiv 2004.05150; Jiang et al., arXiv 2310.06825)."""

from typing import ClassVar

import mlx.nn as nn

from ..layers.arguments import check_sizes
from ..layers.attention.mixer import SelfAttention
from ..layers.attention.options import KeyValueCache
from ..layers.attention.positions import PositionBias, RoPE
from ..layers.mixer import Linears


class SlidingWindowAttention(SelfAttention):
    r"""Softmax attention in which each token sees only those nearer than a window.

    .. math::
        y_t = W_o\,\Big[\sum_{j \in N(t)} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)
        \,v_{j,g(h)}\Big]_{h=1..H}, \quad N(t) = \{j : t - W < j \le t\}

    or, if it is not causal, :math:`N(t) = \{j : |t - j| < W\}`. A token counts itself, as in Mistral;
    other code counts otherwise: `window_size=(W - 1, 0)` of flash-attention and `sliding_window = W` of
    Mistral are `window=W` here, and `attention_window` of a Longformer is :math:`2(W - 1)`. Depth `N`
    reaches back `N (W - 1)` tokens. Tokens are read in pieces or blocks, so that time and memory grow
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
        linear: Linears = nn.Linear,
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
