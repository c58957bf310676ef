"""Grouped-query attention (Ainslie et al., arXiv 2305.13245)."""

from typing import ClassVar

import mlx.nn as nn

from ..layers.attention.mixer import SelfAttention
from ..layers.attention.options import AttentionNorms, KeyValueCache, takes_single_arguments
from ..layers.attention.positions import PositionBias, RoPE
from ..layers.mixer import Linears


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
        rope: Rotates queries and keys, made for `head_dim`; `None`: it does not.
        position_bias: Adds a term to the scores by the distance, made for `num_heads`.
        norms: The norms inside.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.
        cache: Which tokens are seen, and how their keys and values are kept. The fields of `norms`
            and `cache` can still be given one by one, as before they were grouped; that is deprecated.

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

    @takes_single_arguments
    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = nn.Linear,
        bias: bool = False,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        norms: AttentionNorms = AttentionNorms(),  # noqa: B008 (frozen)
        is_causal: bool = True,
        cache: KeyValueCache = KeyValueCache(),  # noqa: B008
    ):
        super().__init__(
            dims,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            linear=linear,
            bias=bias,
            rope=rope,
            position_bias=position_bias,
            norms=norms,
            is_causal=is_causal,
            cache=cache,
        )
