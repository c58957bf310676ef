"""Synthesizer: attention without products of queries and keys (Tay et al., arXiv 2005.00743)."""

import math
from typing import Any, ClassVar, Literal, get_args

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sizes, dims_of_a_head
from ..layers.cached_tokens import CachedTokens, KeyValueMixer, TokenPositions, read_with_positions
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, factory_of
from ..ops.activations import relu

Scores = Literal["dense", "random", "factorized_dense", "factorized_random"]
Tiling = Literal["both_ways", "each", "whole"]


class Synthesizer(KeyValueMixer):
    r"""Softmax attention whose scores come from each token alone, or from its position.

    .. math::
        y = W_o\,[\mathrm{softmax}(S_h)\,V_h]_{h=1..H}

    with one row of `T` scores for each token, of which a shorter sequence takes the first:

    - dense: :math:`S_t = W_2\,\mathrm{relu}(W_1 q_t + b_1) + b_2`, shared by the heads;
    - random: a learned matrix :math:`S = R`; freeze `table` for one that stays random;
    - factorized dense: :math:`S_{t,m} = A_{t,\alpha(m)} B_{t,\beta(m)}` of `a` and `b` projections;
    - factorized random: :math:`S = R_1 R_2`, of rank `k`.

    In factorized dense, `tiling` says which of the numbers meet. "both_ways" repeats each of A and the
    whole of B, :math:`\alpha = \lfloor m / b \rfloor, \beta = m \bmod b`, so that all pairs occur, as
    the paper wants. Public codes repeat both in the same way, and columns can coincide: "each" has
    :math:`\lfloor m / b \rfloor` and :math:`\lfloor m / a \rfloor`, "whole" has the remainders.

    Source: Tay et al., arXiv 2005.00743.

    Args:
        dims: Model dims `D`.
        max_length: The longest sequence `T`.
        scores: Where scores come from.
        has_products: Scores of queries and keys are added (a mixture).
        score_scale: What those are multiplied by. Default: :math:`1 / \sqrt K`.
        score_dims: Width of the dense map between :math:`W_1` and :math:`W_2`, the number `a` of the
            factorized dense one, or the rank `k`. Default: `K`, about the root of `T`, or 8.
        tiling: As described above.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        value_head_dim: Dims `V` of a head's values. Default: `K`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether queries, keys and values are projected with a bias; scores always are.
        output_bias: Whether the output is. Default: `bias`.
        is_causal: Later tokens are not seen.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState`, whose keys are empty unless there are products; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. A word is unknown, or a sequence is longer than
            `max_length`.

    Example:
        >>> Synthesizer(32, max_length=16)(mx.zeros((1, 9, 32)))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "y = softmax(W_2 relu(W_1 x)) V, or softmax(R) V"
    complexity: ClassVar[str] = "T^2 D"
    paper: ClassVar[str] = "arXiv 2005.00743"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    length_bound: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    partition = Partition(
        {**QUERIES_KEYS_VALUES, "first_proj": 1, "second_proj": 1},
        arrays=("table", "left_table", "right_table"),
    )

    def __init__(
        self,
        dims: int,
        *,
        max_length: int,
        scores: Scores = "dense",
        has_products: bool = False,
        score_scale: float | None = None,
        score_dims: int | None = None,
        tiling: Tiling = "both_ways",
        num_heads: int = 8,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        output_bias: bool | None = None,
        is_causal: bool = True,
    ):
        super().__init__()
        check_sizes("Synthesizer", max_length=max_length)
        check_optional_sizes("Synthesizer", score_dims=score_dims, value_head_dim=value_head_dim)
        for name, word, known in (("scores", scores, Scores), ("tiling", tiling, Tiling)):
            if word not in get_args(known):
                listed = ", ".join(map(repr, get_args(known)))
                raise ValueError(
                    f"[Synthesizer] '{name}' must be one of {listed} but got {word!r:.80}."
                )
        head_dim = dims_of_a_head("Synthesizer", dims, num_heads, head_dim)
        self._dims = dims
        self._max_length = max_length
        self.is_causal = is_causal
        self._tiling = tiling
        self._scale = head_dim**-0.5 if score_scale is None else score_scale
        self._key_dims = head_dim if has_products else 0
        self._value_dims = head_dim if value_head_dim is None else value_head_dim
        self.num_heads = num_heads
        widths = {"value_proj": self._value_dims}
        if has_products or scores == "dense":
            widths["query_proj"] = head_dim
        if has_products:
            widths["key_proj"] = head_dim
        inner = {name: [num_heads * width] for name, width in widths.items()}
        self.make_projections(dims, inner, linear, bias=bias)
        self._make_scores(scores, score_dims, head_dim, linear)
        output_bias = bias if output_bias is None else output_bias
        self.make_output(num_heads * self._value_dims, dims, linear, bias=output_bias)

    def _make_scores(
        self, scores: Scores, score_dims: int | None, head_dim: int, linear: Linears
    ) -> None:
        heads, length = self.num_heads, self._max_length
        if scores == "dense":
            hidden = head_dim if score_dims is None else score_dims
            for name, sizes in {
                "score_up_proj": (head_dim, hidden),
                "score_proj": (hidden, length),
            }.items():
                self[name] = factory_of(linear, name)(*sizes, bias=True)
        elif scores == "random":
            self.table = mx.random.normal((heads, length, length)) * length**-0.5
        elif scores == "factorized_random":
            rank = 8 if score_dims is None else score_dims
            self.left_table = mx.random.normal((heads, length, rank)) * rank**-0.5
            self.right_table = mx.random.normal((heads, rank, length)) * rank**-0.5
        else:
            first = math.isqrt(length) if score_dims is None else score_dims
            self._factors = (first, -(-length // first))
            for name, count in zip(("first_proj", "second_proj"), self._factors, strict=True):
                self.make_projections(self._dims, {name: [heads * count]}, linear, bias=True)

    @property
    def cached_dims(self) -> tuple[int, int, int]:
        return self.num_heads, self._key_dims, self._value_dims

    def mix(self, *given: Any) -> tuple[mx.array, CachedTokens]:
        *parts, state, context = given
        weights, values, after = self._weigh(parts, state, context)
        return merge_heads(weights @ values.astype(mx.float32)), after

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        self.check_tokens(x)
        state = self.init_state(x.shape[0], x.dtype)
        weights, _, _ = self._weigh(self.apart(self.project(x)), state, Context())
        return mx.broadcast_to(weights, (x.shape[0], *weights.shape[1:]))

    def _weigh(
        self, parts: list[mx.array], state: CachedTokens, context: Context
    ) -> tuple[mx.array, mx.array, CachedTokens]:
        """Weights `(B or 1, H, L, N)`, values `(B, H, N, V)` and the state."""
        heads = {
            name: split_heads(part, self.num_heads)
            for name, part in zip(self.projections, parts, strict=True)
        }
        values, queries = heads["value_proj"], heads.get("query_proj")
        keys = heads.get("key_proj", values[..., :0])
        keys, values, positions, after = read_with_positions(keys, values, state, context)
        scores = positions.columns_of(self._rows(heads, positions).astype(mx.float32))
        if self._key_dims and queries is not None:
            q, k = queries.astype(mx.float32) * self._scale, keys.astype(mx.float32)
            scores = scores + q @ k.swapaxes(-1, -2)
        if positions.seen is not None:
            scores = mx.where(positions.seen, scores, -mx.inf)
        return mx.softmax(scores, axis=-1), values, after

    def _rows(self, heads: dict[str, mx.array], positions: TokenPositions) -> mx.array:
        """The scores of each token for all positions, `(B or 1, H, L, T)`."""
        if "score_proj" in self:
            rows: mx.array = self.score_proj(relu(self.score_up_proj(heads["query_proj"])))
            return rows
        if "table" in self:
            return positions.rows_of(self.table)
        if "left_table" in self:
            left = positions.rows_of(self.left_table).astype(mx.float32)
            return left @ self.right_table.astype(mx.float32)
        column, (a, b) = mx.arange(self._max_length), self._factors
        first = column % a if self._tiling == "whole" else column // b
        second = column // a if self._tiling == "each" else column % b
        factors = (
            heads[name].astype(mx.float32)[..., chosen]
            for name, chosen in (("first_proj", first), ("second_proj", second))
        )
        return next(factors) * next(factors)
