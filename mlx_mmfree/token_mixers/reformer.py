"""Reformer: attention to tokens of similar queries (Kitaev et al., arXiv 2001.04451)."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_sizes, dims_of_a_head
from ..layers.attention.key_values import KeyValueState, extend, read
from ..layers.cached_tokens import CachedTokens, KeyValueMixer
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, one_hot_values, split_heads
from ..layers.mixer import Group, Linears, Partition, own_share

Tokens = tuple[mx.array, mx.array, mx.array]
UNSEEN = -1e9
"""The score of a key that is not seen; finite, so that padding that sees nothing has a gradient."""


def draw_rotations(
    num_heads: int, head_dim: int, rounds: int, factors: Sequence[int], seed: int
) -> mx.array:
    """Directions, the same for the same seed and sizes, float32 `(H, K, R, sum of factors / 2)`."""
    shape = (num_heads, head_dim, rounds, sum(factors) // 2)
    return mx.random.normal(shape, key=mx.random.key(seed))


def hash_buckets(queries: mx.array, rotations: mx.array, factors: Sequence[int]) -> mx.array:
    r"""The bucket of each query in each round, :math:`\mathrm{argmax}[q R; -q R]`.

    Args:
        queries: `(B, H, N, K)`.
        rotations: `(H or 1, K, R, n / 2)`; with several factors `n` is their sum.
        factors: Even numbers, whose product is the number of buckets. The bucket is counted with the
            first factor as the lowest digit.

    Returns:
        Integers `(B, H, R, N)`.
    """
    exact = mx.stop_gradient(queries).astype(mx.float32)
    heads, dims, rounds, half = rotations.shape
    rotated = exact @ rotations.astype(mx.float32).reshape(heads, dims, rounds * half)
    rotated = mx.unflatten(rotated, -1, (rounds, half)).swapaxes(2, 3)
    buckets, start, unit = mx.zeros(rotated.shape[:-1], mx.int32), 0, 1
    for factor in factors:
        part = rotated[..., start : start + factor // 2]
        digit = mx.argmax(mx.concatenate([part, -part], axis=-1), axis=-1)
        buckets = buckets + unit * digit.astype(mx.int32)
        start, unit = start + factor // 2, unit * factor
    return buckets


class Rules(NamedTuple):
    """The tokens that a token sees, and how near they are.

    Attributes:
        chunk: Tokens `C` of a chunk.
        scale: What products of queries and keys are multiplied by.
        own_score: The score of the token itself, lower than any other token's.
        is_causal: Later tokens are not seen.
        has_ring: A token that asks alone sees two chunks of a ring, as `_ring` tells.
    """

    chunk: int
    scale: float
    own_score: float
    is_causal: bool
    has_ring: bool = False


class Sorted(NamedTuple):
    """Tokens sorted by bucket and position, in chunks.

    Attributes:
        order: The token at each index of each round, `(B, H, R, N)`.
        rank: The index of each token, `(B, H, R, N)`.
        near: The tokens of each chunk and of the one before it, `(B, H, R N / C, 2 C)`.
    """

    order: mx.array
    rank: mx.array
    near: mx.array


def sort_tokens(buckets: mx.array, positions: mx.array, chunk: int) -> Sorted:
    """Sorts tokens, whose number `N` is a multiple of the chunk.

    Args:
        buckets: `(B, H, R, N)`.
        positions: That of each token, `(B, N)`; -1 for padding, which comes last.
        chunk: Tokens of a chunk.
    """
    batch, _, rounds, count = buckets.shape
    is_real = (positions >= 0)[:, None, None]
    # every key is there only once, so that the sort need not be stable
    highest = mx.array(2**62, mx.int64)
    keys = buckets.astype(mx.int64) * (2**31) + positions[:, None, None]
    order = mx.argsort(mx.where(is_real, keys, highest + mx.arange(count)), axis=-1)
    rank = mx.argsort(order, axis=-1)
    number = count // chunk
    cells = order.reshape(*order.shape[:2], rounds * number, chunk)
    # before the first chunk of a round stands the last one with tokens of the round before
    last = mx.maximum((is_real[:, 0, 0].sum(axis=-1) - 1) // chunk, 0)
    index = mx.arange(rounds * number)
    before = mx.where(
        index % number > 0, index - 1, (index // number - 1) % rounds * number + last[:, None]
    )
    before = before.reshape(batch, 1, rounds * number, 1)
    near = mx.concatenate([cells, mx.take_along_axis(cells, before, axis=2)], axis=-1)
    return Sorted(order, rank, near)


def attend_chunks(
    queries: mx.array,
    query_positions: mx.array,
    near: mx.array,
    tokens: Tokens,
    rules: Rules,
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention of queries to the tokens near them.

    Args:
        queries: In chunks, float32 `(B, H, X, C, K)`.
        query_positions: `(B, H or 1, X, C)`.
        near: The tokens that each chunk sees, `(B, H, X, Y)`.
        tokens: Keys `(B, H, N, K)` and values `(B, H, N, V)` in float32, and positions `(B, N)`.
        rules: What is seen.

    Returns:
        `(B, H, X, C, V)`, and the largest score of each query with the sum of its weights relative to
        it, `(B, H, X, C, 1)` each. Together they would lose the digits of the sum beside an own score.
    """
    keys, values, positions = tokens
    flat = mx.flatten(near, 2)
    near_keys, near_values = (
        mx.unflatten(mx.take_along_axis(each, flat[..., None], axis=2), 2, near.shape[2:])
        for each in (keys, values)
    )
    key = mx.take_along_axis(positions[:, None], flat, axis=2).reshape(near.shape)[..., None, :]
    query = query_positions[..., None]
    scores = (queries * rules.scale) @ near_keys.swapaxes(-1, -2)
    scores = mx.where(key == query, rules.own_score, scores)
    hidden = key < 0
    if rules.is_causal:
        hidden = mx.logical_or(hidden, key > query)
    scores = mx.where(hidden, UNSEEN, scores)
    largest = mx.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = mx.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return (weights / total) @ near_values, largest, total


def hashed_attention(
    queries: mx.array,
    tokens: Tokens,
    buckets: mx.array,
    rules: Rules,
    asked: mx.array | None = None,
) -> mx.array:
    """Attention of tokens to those that fall near them in some round.

    Args:
        queries: Of all tokens, float32 `(B, H, N, K)`, or of those at `asked`.
        tokens: Keys, values and positions, as `attend_chunks` takes them.
        buckets: `(B, H, R, N)`.
        rules: What is seen.
        asked: The tokens that ask, `(B, L)`; `None`: all.

    Returns:
        float32 `(B, H, L, V)`.
    """
    count = buckets.shape[-1]
    rules = rules._replace(chunk=min(rules.chunk, count))
    has_ring = rules.has_ring and asked is not None and asked.shape[1] == 1
    # a ring needs padding after the last token
    missing = rules.chunk - count % rules.chunk if has_ring else -count % rules.chunk
    if missing:
        pad = [(0, 0), (0, 0), (0, missing), (0, 0)]
        keys, values, positions = tokens
        positions = mx.pad(positions, [(0, 0), (0, missing)], constant_values=-1)
        tokens = (mx.pad(keys, pad), mx.pad(values, pad), positions)
        buckets = mx.pad(buckets, [(0, 0), (0, 0), (0, 0), (0, missing)])
    found = sort_tokens(buckets, tokens[2], rules.chunk)
    if asked is None:
        queries = mx.pad(queries, pad) if missing else queries
        parts = _attend_all(queries, tokens, found, rules)
    elif has_ring:
        parts = _attend_near(queries, tokens, _ring(tokens[2], found, rules, asked), rules, asked)
    else:
        parts = _attend_some(queries, tokens, found, rules, asked)
    y, largest, total = parts
    weights = total * mx.exp(largest - largest.max(axis=2, keepdims=True))
    y = (y * (weights / weights.sum(axis=2, keepdims=True))).sum(axis=2)
    return y[:, :, :count] if asked is None else y


def _attend_all(
    queries: mx.array, tokens: Tokens, found: Sorted, rules: Rules
) -> tuple[mx.array, ...]:
    """The result of `attend_chunks` for each round and token, `(B, H, R, N, ...)`."""
    shape, order = found.order.shape, mx.flatten(found.order, 2)
    sizes = (order.shape[2] // rules.chunk, rules.chunk)
    sorted_queries = mx.take_along_axis(queries, order[..., None], axis=2)
    own = mx.take_along_axis(tokens[2][:, None], order, axis=2)
    parts = attend_chunks(
        mx.unflatten(sorted_queries, 2, sizes),
        mx.unflatten(own, 2, sizes),
        found.near,
        tokens,
        rules,
    )
    back = found.rank[..., None]
    return tuple(mx.take_along_axis(part.reshape(*shape, -1), back, axis=3) for part in parts)


def _attend_some(
    queries: mx.array, tokens: Tokens, found: Sorted, rules: Rules, asked: mx.array
) -> tuple[mx.array, ...]:
    """The result of `attend_chunks` for each round and asking token, each in a chunk of its own."""
    rounds, count = found.rank.shape[2:]
    cell = mx.take_along_axis(found.rank, asked[:, None, None], axis=3) // rules.chunk
    cell = cell + (mx.arange(rounds) * (count // rules.chunk))[:, None]
    near = mx.take_along_axis(found.near, mx.flatten(cell, 2)[..., None], axis=2)
    return _attend_near(queries, tokens, near, rules, asked)


def _attend_near(
    queries: mx.array, tokens: Tokens, near: mx.array, rules: Rules, asked: mx.array
) -> tuple[mx.array, ...]:
    """The result of `attend_chunks` for each round and asking token with the tokens near it."""
    rounds = near.shape[2] // asked.shape[1]
    own = mx.take_along_axis(tokens[2], asked, axis=1)
    parts = attend_chunks(
        mx.concatenate([queries] * rounds, axis=2)[:, :, :, None],
        mx.concatenate([own] * rounds, axis=1)[:, None, :, None],
        near,
        tokens,
        rules,
    )
    return tuple(mx.unflatten(part[:, :, :, 0], 2, (rounds, -1)) for part in parts)


def _ring(positions: mx.array, found: Sorted, rules: Rules, asked: mx.array) -> mx.array:
    """The tokens that one token sees in each round in Transformers, `(B, H, R, 2 C)`.

    The real tokens of a round, sorted, form a ring, which the chunk of the token and the one before may
    run through more than once; who is met twice counts twice. Up to a chunk all are seen, once.
    """
    count = (positions >= 0).sum(axis=-1)[:, None, None, None]
    chunk, token = rules.chunk, mx.arange(2 * rules.chunk)
    rank = mx.take_along_axis(found.rank, asked[:, None, None], axis=3).astype(mx.int32)
    first = (rank // chunk - 1) * chunk
    # padding is sorted after the tokens, and hidden
    every = mx.minimum(token, found.order.shape[3] - 1)
    index = mx.where(count > chunk, (first + token) % count, every)
    return mx.take_along_axis(found.order, index, axis=3)


def factors_of(count: int, chunk: int) -> tuple[int, ...]:
    """Even factors of about twice as many buckets as there are chunks; two of more than 32."""
    halves = max(0, math.ceil(math.log2(max(1, count / chunk))))
    if halves < 5:
        return (2 ** (halves + 1),)
    return (2 ** ((halves + 1) // 2), 2 ** (halves + 1 - (halves + 1) // 2))


Convention = Literal["trax", "transformers", "reformer_pytorch"]


class _Scores(NamedTuple):
    """The difference between public codes.

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
    the order of all tokens of the call. So what a text longer than a chunk gives whole and in chunks
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
        convention: `"trax"`, `"transformers"` or `"reformer_pytorch"`, as described above.
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
        linear: Linears = Linear,
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
        self.is_causal = is_causal
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
        width = num_heads * head_dim
        inner = {"query_key_proj": [width], "value_proj": [width]}
        self.make_projections(dims, inner, linear)
        self.make_output(width, dims, linear)

    def take_part(self, group: Group) -> None:
        self._own_heads = own_share(self.num_heads, group)

    @property
    def cached_dims(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim

    def buckets(self, x: mx.array, rotations: mx.array | None = None) -> mx.array:
        """The bucket of each token of a sequence in each round, integers `(B, H, rounds, L)`."""
        return self._hashed(split_heads(self["query_key_proj"](x), self.num_heads), rotations)

    def mix(
        self,
        queries: mx.array,
        values: mx.array,
        state: CachedTokens,
        context: Context,
        *,
        rotations: mx.array | None = None,
    ) -> tuple[mx.array, CachedTokens]:
        queries, values = (split_heads(part, self.num_heads) for part in (queries, values))
        seen, asked, after = queries, None, state
        length, token = queries.shape[2], mx.arange(queries.shape[2])[None]
        counts = context.counts
        positions = token if counts is None else mx.where(token < counts[:, None], token, -1)
        if isinstance(state, KeyValueState):
            reading = read(state.positions, length, counts)
            seen, values, after = extend(state, queries, values, reading)
            positions = reading.positions
            if state.used:
                # padding after the tokens has no slot, and any index does
                asked = mx.minimum(reading.token_positions, seen.shape[2] - 1)
        positions = mx.broadcast_to(positions, (seen.shape[0], seen.shape[2]))
        is_step = self._rules.has_ring and length == 1
        is_short = not is_step and 2 * length * self._rules.chunk > seen.shape[2]
        is_whole = asked is None or is_short
        exact = [part.astype(mx.float32) for part in (queries, seen, values)]
        asking, all_queries, values = exact
        y = hashed_attention(
            all_queries if is_whole else asking,
            (self._keys(all_queries), values, positions),
            self._hashed(seen, rotations),
            self._rules,
            None if is_whole else asked,
        )
        if is_whole and asked is not None:
            index = mx.broadcast_to(asked, (seen.shape[0], length))
            y = mx.take_along_axis(y, index[:, None, :, None], axis=2)
        return merge_heads(y), after

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
