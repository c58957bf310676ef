"""Reformer: attention to tokens of similar queries (Kitaev et al., arXiv 2001.04451)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..layers import project
from ..layers.arguments import check_sizes
from ..layers.context import Context
from ..layers.heads import dims_of_a_head, merge_heads, one_hot_values, split_heads
from ..layers.key_value_mixer import HeldTokens, KeyValueMixer
from ..layers.key_value_reading import extend, read
from ..layers.key_value_state import KeyValueState
from ..layers.linear_factory import Linears, factory_of
from ..layers.mixing.hashed_attention import (
    Rules,
    draw_rotations,
    factors_of,
    hash_buckets,
    hashed_attention,
)
from ..layers.padding import RealTokens
from ..layers.partition import Group, Partition, own_share

Convention = Literal["trax", "transformers", "reformer_pytorch"]


class _Scores(NamedTuple):
    """What sets public codes apart.

    Attributes:
        norm_eps: Epsilon of the norm of keys.
        has_root: Scores are divided by the root of the dims.
        own_score: The score of oneself.
        has_ring: As `Rules` has it.
    """

    norm_eps: float
    has_root: bool
    own_score: float
    has_ring: bool = False


_CONVENTIONS: dict[Convention, _Scores] = {
    "trax": _Scores(1e-6, False, -1e5),
    "transformers": _Scores(1e-6, False, -1e5, has_ring=True),
    "reformer_pytorch": _Scores(1e-24, True, -5e4),
}


class Reformer(KeyValueMixer):
    r"""Softmax attention within sorted buckets of a hash, with queries that are keys.

    .. math::
        o_t^r = \sum_{j \in N_r(t)} \mathrm{softmax}_j(s\,q_t^\top k_j)\,v_j, \quad
        k_j = q_j / \lVert q_j \rVert, \quad
        o_t = \sum_r \mathrm{softmax}_r(\ell_t^r)\,o_t^r, \quad y_t = W_o\,[o_{t,h}]_{h=1..H}

    In each round `r`, tokens are sorted by :math:`\mathrm{argmax}[q R_r; -q R_r]` and by position, and
    cut into chunks; :math:`N_r(t)` is the chunk of `t` and the one before, and :math:`\ell_t^r` the
    logarithm of the sum of its weights. The first chunk of a round looks at the last one of the round
    before. A token sees itself only if it sees nothing else. Pairs that meet in several rounds count
    several times, as in both public codes, which differ in `s`: it is 1 in trax and Transformers, and
    :math:`1 / \sqrt K` in reformer-pytorch.

    Causality is by position: no later token is weighed, but which earlier ones are near follows from
    the order of all tokens of the call. So what a text longer than a chunk gives whole and in pieces
    differs; a token that is read by itself sees what it would at the end of the text so far, or with
    `"transformers"` two chunks in a ring of sorted tokens, as there. Up to a chunk all is seen, and they
    are equal. Published models draw rotations anew in each call; here they follow from `seed`.

    Source: Kitaev et al., arXiv 2001.04451.

    Args:
        dims: Model dims `D`.
        chunk_size: Tokens of a chunk.
        num_rounds: Rounds of hashing.
        num_buckets: An even number of buckets, or even factors of it. Default: about two for each chunk
            of `usual_length` tokens. It does not follow from the texts of a call, so that a text is
            hashed alike alone and in a longer batch.
        usual_length: Tokens of a usual text; longer ones are read too. Models give their longest.
        convention: `"trax"`, `"transformers"` or `"reformer_pytorch"`, as told above.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        seed: Of the rotations.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_causal: Later tokens are not seen.

    Shape:
        `x` and `y`: `(B, L, D)`; `rotations`: `(H or 1, K, rounds, n / 2)` for `n` buckets, in place of
        those that the seed gives.

    State:
        `KeyValueState`, whose keys are the queries; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The convention is unknown, or a factor of the
            buckets is odd.

    Example:
        >>> Reformer(32, chunk_size=4)(mx.zeros((1, 9, 32)))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "y = softmax(Q K^T) V, K = Q / |Q|, over the own bucket's chunks"
    complexity: ClassVar[str] = "R T C D, and a sort in R T log T"
    paper: ClassVar[str] = "arXiv 2001.04451"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    is_exact: ClassVar[bool] = False
    partition = Partition({"query_key_proj": 1, "value_proj": 1})

    def __init__(
        self,
        dims: int,
        *,
        chunk_size: int = 64,
        num_rounds: int = 4,
        num_buckets: int | Sequence[int] | None = None,
        usual_length: int = 4096,
        convention: Convention = "trax",
        num_heads: int = 8,
        head_dim: int | None = None,
        seed: int = 0,
        linear: Linears = nn.Linear,
        is_causal: bool = True,
    ):
        super().__init__()
        check_sizes(
            "Reformer", chunk_size=chunk_size, num_rounds=num_rounds, usual_length=usual_length
        )
        if convention not in _CONVENTIONS:
            raise ValueError(
                f"[Reformer] 'convention' must be one of {', '.join(map(repr, _CONVENTIONS))} but got "
                f"{convention!r:.80}."
            )
        head_dim = dims_of_a_head("Reformer", dims, num_heads, head_dim)
        self._dims = dims
        self._is_causal = is_causal
        self._seed = seed
        self._num_rounds = num_rounds
        self._factors = _checked(num_buckets) or factors_of(usual_length, chunk_size)
        scores = _CONVENTIONS[convention]
        self._norm_eps = scores.norm_eps
        scale = head_dim**-0.5 if scores.has_root else 1.0
        self._rules = Rules(chunk_size, scale, scores.own_score, is_causal, scores.has_ring)
        self.num_heads = num_heads
        self._drawn_heads, self._own_heads = num_heads, slice(num_heads)
        self.head_dim = head_dim
        for name in ("query_key_proj", "value_proj"):
            self[name] = factory_of(linear, name)(dims, num_heads * head_dim, bias=False)
        self.output_proj = factory_of(linear, "output_proj")(num_heads * head_dim, dims, bias=False)

    def take_part(self, group: Group) -> None:
        self._own_heads = own_share(self.num_heads, group)

    @property
    def held_dims(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim

    def buckets(self, x: mx.array, rotations: mx.array | None = None) -> mx.array:
        """The bucket of each token of a sequence in each round, integers `(B, H, rounds, L)`."""
        return self._hashed(split_heads(self["query_key_proj"](x), self.num_heads), rotations)

    def __call__(
        self,
        x: mx.array,
        state: HeldTokens | None = None,
        valid: mx.array | None = None,
        *,
        rotations: mx.array | None = None,
    ) -> tuple[mx.array, HeldTokens]:
        return self.read_tokens(x, state, Context(valid), partial(self._mix, rotations))

    def _mix(
        self,
        rotations: mx.array | None,
        x: mx.array,
        before: HeldTokens,
        tokens: RealTokens,
    ) -> tuple[mx.array, HeldTokens]:
        projected = project(x, (self["query_key_proj"], self["value_proj"]))
        both = split_heads(projected, 2 * self.num_heads)
        queries, values = mx.split(both, 2, axis=1)
        seen, places, after = queries, None, before
        length, token = x.shape[1], mx.arange(x.shape[1])[None]
        positions = (
            token if tokens.counts is None else mx.where(token < tokens.counts[:, None], token, -1)
        )
        if isinstance(before, KeyValueState):
            reading = read(before.positions, length, tokens.counts)
            seen, values, after = extend(before, queries, values, reading)
            positions = reading.positions
            if before.used:
                # padding behind the tokens has no slot, and any place does
                places = mx.minimum(reading.places, seen.shape[2] - 1)
        positions = mx.broadcast_to(positions, (x.shape[0], seen.shape[2]))
        is_step = self._rules.has_ring and length == 1
        is_short = not is_step and 2 * length * self._rules.chunk > seen.shape[2]
        is_whole = places is None or is_short
        exact = [part.astype(mx.float32) for part in (queries, seen, values)]
        asking, all_queries, values = exact
        y = hashed_attention(
            all_queries if is_whole else asking,
            (self._keys(all_queries), values, positions),
            self._hashed(seen, rotations),
            self._rules,
            None if is_whole else places,
        )
        if is_whole and places is not None:
            index = mx.broadcast_to(places, x.shape[:2])
            y = mx.take_along_axis(y, index[:, None, :, None], axis=2)
        return project(merge_heads(y).astype(x.dtype), (self["output_proj"],)), after

    def mixing_weights(
        self, x: mx.array, *, rotations: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        self.check_tokens(x)
        heads = split_heads(self["query_key_proj"](x), self.num_heads)
        buckets, queries = self._hashed(heads, rotations), heads.astype(mx.float32)
        positions = mx.broadcast_to(mx.arange(x.shape[1]), x.shape[:2])
        tokens = (self._keys(queries), one_hot_values(*heads.shape[:3]), positions)
        return hashed_attention(queries, tokens, buckets, self._rules)

    def _keys(self, queries: mx.array) -> mx.array:
        """Queries of the length 1."""
        squares = queries.square().mean(axis=-1, keepdims=True)
        return queries * (mx.rsqrt(squares + self._norm_eps) * self.head_dim**-0.5)

    def _hashed(self, queries: mx.array, rotations: mx.array | None) -> mx.array:
        if rotations is None:
            sizes = (self._drawn_heads, self.head_dim, self._num_rounds)
            rotations = draw_rotations(*sizes, self._factors, self._seed)
        if rotations.shape[0] > 1:
            rotations = rotations[self._own_heads]
        return hash_buckets(queries, rotations, self._factors)


def _checked(num_buckets: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if num_buckets is None:
        return None
    factors = (num_buckets,) if isinstance(num_buckets, int) else tuple(num_buckets)
    for factor in factors:
        check_sizes("Reformer", num_buckets=factor)
        if factor % 2:
            raise ValueError(
                f"[Reformer] 'num_buckets' must be even, or of even factors, but got {num_buckets}."
            )
    return factors
