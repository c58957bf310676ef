"""Local attention in blocks (Parmar et al., arXiv 1802.05751; Roy et al., arXiv 2003.05997)."""

from typing import ClassVar

import mlx.nn as nn

from ..layers.arguments import check_counts, check_sizes
from ..layers.attention.mixer import SelfAttention
from ..layers.attention.options import KeyValueCache
from ..layers.attention.positions import PositionBias, RoPE
from ..layers.mixer import Linears


class LocalAttention(SelfAttention):
    r"""Softmax attention in which each token sees its block and the blocks beside it.

    .. math::
        y_t = W_o\,\Big[\sum_{j \in N(t)} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)
        \,v_{j,g(h)}\Big]_{h=1..H}, \quad
        N(t) = \{j \le t : \lfloor j / S \rfloor \ge \lfloor t / S \rfloor - n\}

    or, if it is not causal, :math:`N(t) = \{j : |\lfloor j / S \rfloor - \lfloor t / S \rfloor| \le n\}`
    with blocks of `S` tokens and `n` neighbours. How far a token sees depends on its place in its
    block: in causal attention from `n S + 1` to `(n + 1) S` tokens, itself included. The package
    local-attention has a mode of exact windows; that is `SlidingWindowAttention` with a window of
    `S + 1`. A sequence need not consist of whole blocks; beyond its ends there is nothing to be seen.
    Blocks are counted from the first token of a sample.

    Sources: Parmar et al., arXiv 1802.05751; Roy et al., arXiv 2003.05997.

    Args:
        dims: Model dims `D`.
        block_size: Tokens `S` of a block.
        neighbours: Blocks `n` that are seen before the own one, and behind it if it is not causal.
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
        linear: Linears = nn.Linear,
        bias: bool = False,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        is_causal: bool = True,
    ):
        check_sizes("LocalAttention", block_size=block_size)
        check_counts("LocalAttention", neighbours=neighbours)
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
            cache=KeyValueCache((neighbours + 1) * block_size, step=block_size),
        )
