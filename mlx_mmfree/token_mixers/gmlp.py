"""gMLP: a perceptron whose gate is mixed along the sequence (Liu et al., arXiv 2105.08050)."""

from typing import Any, ClassVar

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sizes
from ..layers.cached_tokens import CachedTokens, KeyValueMixer, TokenPositions, read_with_positions
from ..layers.dense import Linear
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, factory_of
from ..layers.norms import LayerNorm
from ..ops import activate


class GMLP(KeyValueMixer):
    r"""Spatial gating: one half of the channels gates the other after a product along the sequence.

    .. math::
        [u \mid v] &= \mathrm{gelu}(W_i X), \quad S = W_s\,\mathrm{LN}(v) + b_s + A(X) \\
        Y &= W_o\,(u \odot S)

    with :math:`W_s \in R^{T \times T}` and a bias for each token, made for a longest sequence `T`; a
    shorter one takes the top left corner. If it is causal, what lies above the diagonal is not seen.
    `A` is an optional small attention of one head (aMLP). It holds its own expansion of the channels,
    as the block of the paper does: a model of this mixer alone leaves the channel mixer out or small.
    Padding has no position: positions are counted over real tokens.

    Source: Liu et al., arXiv 2105.08050.

    Args:
        dims: Model dims `D`.
        max_length: The longest sequence `T`.
        hidden_dims: Channels after :math:`W_i`, both halves. Default: `4 * dims`.
        num_heads: Matrices along the sequence, each for an equal part of the channels.
        attention_dims: Dims of queries, keys and values of the small attention; `None`: there is none.
        norm_eps: Epsilon of the norm.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each. :math:`W_s` is a plain array.
        is_causal: Later tokens are not seen.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState` of the normed halves and of the attention's keys and values; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The hidden dims are not a multiple of twice the
            heads, or a sequence is longer than `max_length`.

    Example:
        >>> GMLP(32, max_length=16)(mx.zeros((1, 9, 32)))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "[u | v] = gelu(W_i X), Y = W_o (u * (W_s norm(v) + b_s))"
    complexity: ClassVar[str] = "T^2 F / 2"
    paper: ClassVar[str] = "arXiv 2105.08050"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    length_bound: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        max_length: int,
        hidden_dims: int | None = None,
        num_heads: int = 1,
        attention_dims: int | None = None,
        norm_eps: float = 1e-5,
        linear: Linears = Linear,
        is_causal: bool = True,
    ):
        super().__init__()
        check_sizes("GMLP", dims=dims, max_length=max_length, num_heads=num_heads)
        check_optional_sizes("GMLP", hidden_dims=hidden_dims, attention_dims=attention_dims)
        hidden_dims = 4 * dims if hidden_dims is None else hidden_dims
        if hidden_dims % (2 * num_heads):
            raise ValueError(
                "[GMLP] 'hidden_dims' must be a multiple of twice 'num_heads' but got "
                f"{hidden_dims} for {num_heads} heads."
            )
        half = hidden_dims // 2
        self._dims = dims
        self._half = half
        self._max_length = max_length
        self.is_causal = is_causal
        self._attention_dims = attention_dims
        self.num_heads = num_heads
        self.make_projections(dims, {"input_proj": [half, half]}, linear, bias=True)
        self.gate_norm = LayerNorm(half, eps=norm_eps)
        bound = 1e-3 / max_length
        shape = (num_heads, max_length, max_length)
        self.spatial_weight = mx.random.uniform(-bound, bound, shape)
        self.spatial_bias = mx.ones((num_heads, max_length))
        if attention_dims is not None:
            inner = {name: [attention_dims] for name in QUERIES_KEYS_VALUES}
            self.make_projections(dims, inner, linear)
            make = factory_of(linear, "attention_proj")
            self.attention_proj = make(attention_dims, half, bias=True)
        self.make_output(half, dims, linear, bias=True)

    @property
    def cached_dims(self) -> tuple[int, int, int]:
        width = self._attention_dims or 0
        return 1, width, self._half + width

    def mix(self, u: mx.array, v: mx.array, *others: Any) -> tuple[mx.array, CachedTokens]:
        *small, state, context = others
        u, values = activate(u, "gelu"), self.gate_norm(activate(v, "gelu"))
        keys = values[..., :0]
        if small:
            _, keys, own = small
            values = mx.concatenate([values, own], axis=-1)
        keys, values, positions, after = read_with_positions(
            keys[:, None], values[:, None], state, context
        )
        gates, attended = mx.split(values[:, 0].astype(mx.float32), [self._half], axis=-1)
        s = self._along(gates, positions)
        if small:
            y = self._shares(small[0], keys[:, 0], positions)[:, 0] @ attended
            s = s + self.attention_proj(y.astype(u.dtype)).astype(mx.float32)
        return u.astype(mx.float32) * s, after

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        """Mixing weights of the heads along the sequence and, last, of the small attention, if any."""
        self.check_tokens(x)
        batch, length, _ = x.shape
        seen = mx.tril(mx.ones((length, length), mx.bool_)) if self.is_causal else None
        positions = TokenPositions(length, None, None, seen)
        along = self._spatial(positions)
        weights = mx.broadcast_to(along, (batch, *along.shape[1:]))
        if self._attention_dims is None:
            return weights
        small = self._shares(self.query_proj(x), self.key_proj(x), positions)
        return mx.concatenate([weights, small], axis=1)

    def _along(self, gates: mx.array, positions: TokenPositions) -> mx.array:
        """The product along the sequence, float32 `(B, L, F / 2)`, of gates `(B, N, F / 2)`."""
        heads = mx.unflatten(gates, -1, (self.num_heads, -1)).swapaxes(1, 2)
        # a bias is a table of one column
        bias = positions.rows_of(self.spatial_bias[..., None].astype(mx.float32))
        return mx.flatten((self._spatial(positions) @ heads + bias).swapaxes(1, 2), 2)

    def _spatial(self, positions: TokenPositions) -> mx.array:
        """The matrices along the sequence, float32 `(B or 1, H, L, N)`."""
        weights = positions.weights(self.spatial_weight.astype(mx.float32))
        return weights if positions.seen is None else mx.where(positions.seen, weights, 0.0)

    def _shares(self, queries: mx.array, keys: mx.array, positions: TokenPositions) -> mx.array:
        """The weights of the small attention of one head, float32 `(B, 1, L, N)`."""
        scale = queries.shape[-1] ** -0.5
        scores = (queries.astype(mx.float32) * scale) @ keys.astype(mx.float32).swapaxes(1, 2)
        scores = scores[:, None]
        if positions.seen is not None:
            scores = mx.where(positions.seen, scores, -mx.inf)
        return mx.softmax(scores, axis=-1)
