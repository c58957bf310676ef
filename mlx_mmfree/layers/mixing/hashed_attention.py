"""Attention within buckets of a locality-sensitive hash (Kitaev et al., arXiv 2001.04451)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

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
    """What a token sees, and how near it is.

    Attributes:
        chunk: Tokens `C` of a chunk.
        scale: What products of queries and keys are multiplied by.
        own_score: The score of the token itself, lower than that of any other.
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
        order: The token at each place of each round, `(B, H, R, N)`.
        rank: The place of each token, `(B, H, R, N)`.
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
    places: mx.array | None = None,
) -> mx.array:
    """Attention of tokens to those that fall near them in some round.

    Args:
        queries: Of all tokens, float32 `(B, H, N, K)`, or of those at `places`.
        tokens: Keys, values and positions, as `attend_chunks` takes them.
        buckets: `(B, H, R, N)`.
        rules: What is seen.
        places: The tokens that ask, `(B, L)`; `None`: all.

    Returns:
        float32 `(B, H, L, V)`.
    """
    count = buckets.shape[-1]
    rules = rules._replace(chunk=min(rules.chunk, count))
    has_ring = rules.has_ring and places is not None and places.shape[1] == 1
    # a ring needs padding behind the last token
    missing = rules.chunk - count % rules.chunk if has_ring else -count % rules.chunk
    if missing:
        pad = [(0, 0), (0, 0), (0, missing), (0, 0)]
        keys, values, positions = tokens
        positions = mx.pad(positions, [(0, 0), (0, missing)], constant_values=-1)
        tokens = (mx.pad(keys, pad), mx.pad(values, pad), positions)
        buckets = mx.pad(buckets, [(0, 0), (0, 0), (0, 0), (0, missing)])
    found = sort_tokens(buckets, tokens[2], rules.chunk)
    if places is None:
        queries = mx.pad(queries, pad) if missing else queries
        parts = _attend_all(queries, tokens, found, rules)
    elif has_ring:
        parts = _attend_near(queries, tokens, _ring(tokens[2], found, rules, places), rules, places)
    else:
        parts = _attend_some(queries, tokens, found, rules, places)
    y, largest, total = parts
    weights = total * mx.exp(largest - largest.max(axis=2, keepdims=True))
    y = (y * (weights / weights.sum(axis=2, keepdims=True))).sum(axis=2)
    return y[:, :, :count] if places is None else y


def _attend_all(
    queries: mx.array, tokens: Tokens, found: Sorted, rules: Rules
) -> tuple[mx.array, ...]:
    """What `attend_chunks` gives for each round and token, `(B, H, R, N, ...)`."""
    shape, place = found.order.shape, mx.flatten(found.order, 2)
    sizes = (place.shape[2] // rules.chunk, rules.chunk)
    sorted_queries = mx.take_along_axis(queries, place[..., None], axis=2)
    own = mx.take_along_axis(tokens[2][:, None], place, axis=2)
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
    queries: mx.array, tokens: Tokens, found: Sorted, rules: Rules, places: mx.array
) -> tuple[mx.array, ...]:
    """What `attend_chunks` gives for each round and asking token, each in a chunk of its own."""
    rounds, count = found.rank.shape[2:]
    cell = mx.take_along_axis(found.rank, places[:, None, None], axis=3) // rules.chunk
    cell = cell + (mx.arange(rounds) * (count // rules.chunk))[:, None]
    near = mx.take_along_axis(found.near, mx.flatten(cell, 2)[..., None], axis=2)
    return _attend_near(queries, tokens, near, rules, places)


def _attend_near(
    queries: mx.array, tokens: Tokens, near: mx.array, rules: Rules, places: mx.array
) -> tuple[mx.array, ...]:
    """What `attend_chunks` gives for each round and asking token with the tokens near it."""
    rounds = near.shape[2] // places.shape[1]
    own = mx.take_along_axis(tokens[2], places, axis=1)
    parts = attend_chunks(
        mx.concatenate([queries] * rounds, axis=2)[:, :, :, None],
        mx.concatenate([own] * rounds, axis=1)[:, None, :, None],
        near,
        tokens,
        rules,
    )
    return tuple(mx.unflatten(part[:, :, :, 0], 2, (rounds, -1)) for part in parts)


def _ring(positions: mx.array, found: Sorted, rules: Rules, places: mx.array) -> mx.array:
    """The tokens that one token sees in each round in Transformers, `(B, H, R, 2 C)`.

    The real tokens of a round, sorted, form a ring, which the chunk of the token and the one before may
    run through more than once; who is met twice counts twice. Up to a chunk all are seen, once.
    """
    count = (positions >= 0).sum(axis=-1)[:, None, None, None]
    chunk, token = rules.chunk, mx.arange(2 * rules.chunk)
    rank = mx.take_along_axis(found.rank, places[:, None, None], axis=3).astype(mx.int32)
    first = (rank // chunk - 1) * chunk
    # padding is sorted behind the tokens, and hidden
    every = mx.minimum(token, found.order.shape[3] - 1)
    index = mx.where(count > chunk, (first + token) % count, every)
    return mx.take_along_axis(found.order, index, axis=3)


def factors_of(count: int, chunk: int) -> tuple[int, ...]:
    """Even factors of about twice as many buckets as there are chunks; two of more than 32."""
    halves = max(0, math.ceil(math.log2(max(1, count / chunk))))
    if halves < 5:
        return (2 ** (halves + 1),)
    return (2 ** ((halves + 1) // 2), 2 ** (halves + 1 - (halves + 1) // 2))
