"""Blocks of tokens, sorted by what they hold (Tay et al., arXiv 2002.11296)."""

from collections.abc import Sequence

import mlx.core as mx

from ...ops import linear_scan
from ..heads import merge_heads, split_heads

NEVER = -1e30
"""The logit of what cannot be."""


def sinkhorn(logits: mx.array, iterations: int) -> mx.array:
    """A matrix whose rows and columns sum to 1, by turns; the columns last, and so exactly.

    Args:
        logits: `(..., N, N)`.
        iterations: Turns of rows and columns.
    """
    for _ in range(iterations):
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        logits = logits - mx.logsumexp(logits, axis=-2, keepdims=True)
    return mx.exp(logits)


def soft_sorting(
    queries: mx.array,
    keys: mx.array,
    real: mx.array,
    *,
    temperature: float,
    iterations: int,
    uniform: mx.array | None = None,
    eps: float = 1e-6,
) -> mx.array:
    r"""Which share of each block stands at each place, by Gumbel-Sinkhorn of products of means.

    .. math::
        P &= \mathrm{Sinkhorn}\big((\log(s_{uv} + \epsilon) + g) / \tau\big), \\
        s_{uv} &= \mathrm{relu}(\bar q_u \cdot \bar k_v / \sqrt K), \quad
        g = -\log(-\log(n + \epsilon) + \epsilon)

    Args:
        queries: In blocks, float32 `(B, H, N, S, K)`, zero where there is no token.
        keys: As the queries.
        real: Which tokens there are, booleans `(B, 1, N, S)`. An empty block stays where it is.
        temperature: :math:`\tau`.
        iterations: Those of Sinkhorn.
        uniform: `n`, numbers from 0 to 1, `(B, H, N, N)`; `None`: there is no noise.
        eps: :math:`\epsilon`.

    Returns:
        float32 `(B, H, N, N)`.
    """
    count = mx.maximum(real.sum(axis=-1), 1)[..., None]
    means = [x.sum(axis=3) / count for x in (queries, keys)]
    scores = means[0] @ means[1].swapaxes(-1, -2) * queries.shape[-1] ** -0.5
    logits = mx.log(mx.maximum(scores, 0.0) + eps)
    if uniform is not None:
        logits = logits - mx.log(-mx.log(uniform + eps) + eps)
    is_block = mx.any(real, axis=-1)
    both = mx.logical_and(is_block[..., :, None], is_block[..., None, :])
    alone = mx.where(mx.eye(scores.shape[-1]) > 0, 0.0, NEVER)
    return sinkhorn(mx.where(both, logits / temperature, alone), iterations)


def past_sorting(
    queries: mx.array, keys: mx.array, *, block: int, count: int, temperature: float
) -> list[tuple[mx.array, mx.array]]:
    """The blocks before each block that its first token finds nearest, one after the other.

    The first token asks by the mean of all queries up to it, and a block answers by the sum of the
    means of all keys up to each of its tokens. Beside the blocks stand as many empty ones as are found,
    with a score of 0.

    Args:
        queries: float32 `(B, H, L, K)`, of whole blocks.
        keys: As the queries.
        block: Tokens of a block.
        count: How many are found.
        temperature: Divides the scores.

    Returns:
        For each, the number of the block, from 1 on and 0 for an empty one, and its weight, which is the
        softmax over the ones that were not found before; `(B, H, N)` each.
    """
    means = [mx.unflatten(_running_mean(x), 2, (-1, block)) for x in (queries, keys)]
    scores = means[0][:, :, :, 0] @ means[1].sum(axis=3).swapaxes(-1, -2)
    scores = scores * (queries.shape[-1] ** -0.5 / temperature)
    number = mx.arange(scores.shape[-1])
    scores = mx.where(number < number[:, None], scores, NEVER)
    scores = mx.pad(scores, [(0, 0), (0, 0), (0, 0), (count, 0)])
    column, found = mx.arange(scores.shape[-1]), []
    for _ in range(count):
        place = mx.argmax(mx.stop_gradient(scores), axis=-1, keepdims=True).astype(mx.int32)
        weight = mx.take_along_axis(mx.softmax(scores, axis=-1), place, axis=-1)
        found.append((mx.maximum(place - count + 1, 0)[..., 0], weight[..., 0]))
        scores = mx.where(column == place, -mx.inf, scores)
    return found


def _running_mean(x: mx.array) -> mx.array:
    """The mean of each row of `(B, H, L, K)` and those before it."""
    number = mx.arange(1, x.shape[2] + 1)[:, None]
    rows = merge_heads(x)
    keep = mx.broadcast_to((number - 1) / number, rows.shape)
    means, _ = linear_scan(keep, rows * (1.0 - keep), mx.zeros((rows.shape[0], rows.shape[2])))
    return split_heads(means, x.shape[1])


def blocks_of(x: mx.array, block: int) -> mx.array:
    """`(B, H, L, K)` in blocks, float32 `(B, H, N, S, K)`, the last one filled up with zeros."""
    missing = -x.shape[2] % block
    x = mx.pad(x.astype(mx.float32), [(0, 0), (0, 0), (0, missing), (0, 0)])
    return mx.unflatten(x, 2, (-1, block))


def attend_blocks(queries: mx.array, keys: mx.array, values: mx.array, seen: mx.array) -> mx.array:
    """Softmax attention of each block, `(B, H, N * S, V)`.

    Args:
        queries: float32 `(B, H, N, S, K)`.
        keys: `(B, H, N, M, K)`.
        values: `(B, H, N, M, V)`.
        seen: Booleans that fit `(B, H, N, S, M)`.
    """
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.swapaxes(-1, -2)
    return mx.flatten(mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ values, 2, 3)


def attend_past_blocks(
    parts: Sequence[mx.array],
    empty: Sequence[mx.array],
    *,
    block: int,
    offset: int,
    count: int,
    temperature: float,
    places: mx.array | None = None,
) -> mx.array:
    """Attention of each token to its block up to itself, and to blocks before that `past_sorting` finds.

    Args:
        parts: Queries, keys and values, float32 `(B, H, L, K)`.
        empty: Key and value of an empty block, `(H, 1, K)`.
        block: Tokens `S` of a block.
        offset: The first token of the first block. Those before it see only each other.
        count: Blocks that are found.
        temperature: That of the sorting.
        places: The tokens whose results are asked for, `(B, A)`; `None`: all.

    Returns:
        float32 `(B, H, L, V)`, or `(B, H, A, V)`.
    """
    if places is not None:
        return _attend_past_of(
            parts,
            empty,
            places,
            block=block,
            offset=offset,
            count=count,
            temperature=temperature,
        )
    length, results = parts[0].shape[2], []
    if offset and length:
        queries, keys, values = (part[:, :, None, : min(offset, length)] for part in parts)
        token = mx.arange(queries.shape[3])
        results.append(attend_blocks(queries, keys, values, token <= token[:, None]))
    if length > offset:
        queries, keys, values = (blocks_of(part[:, :, offset:], block) for part in parts)
        whole = [mx.flatten(part, 2, 3) for part in (queries, keys)]
        found = past_sorting(*whole, block=block, count=count, temperature=temperature)
        near_keys, near_values = (
            mx.concatenate([*(_chosen(part, own, *one) for one in found), part], axis=3)
            for part, own in zip((keys, values), empty, strict=True)
        )
        token = mx.arange(block)
        seen = mx.concatenate(
            [mx.ones((block, count * block), mx.bool_), token <= token[:, None]], axis=1
        )
        results.append(
            attend_blocks(queries, near_keys, near_values, seen)[:, :, : length - offset]
        )
    return mx.concatenate(results, axis=2)


def _attend_past_of(
    parts: Sequence[mx.array],
    empty: Sequence[mx.array],
    places: mx.array,
    *,
    block: int,
    offset: int,
    count: int,
    temperature: float,
) -> mx.array:
    """`attend_past_blocks` of some tokens, each with the keys and values of its own blocks."""
    asked = places[:, None, :, None]
    queries = mx.take_along_axis(parts[0], asked, axis=2)[:, :, :, None]
    y, length = None, parts[0].shape[2]
    if offset:
        first, values = (part[:, :, None, : min(offset, length)] for part in parts[1:])
        seen = mx.arange(first.shape[3]) <= asked[..., None]
        y = attend_blocks(queries, first, values, seen)
    if length <= offset and y is not None:
        return y
    rest = [blocks_of(part[:, :, offset:], block) for part in parts]
    whole = [mx.flatten(part, 2, 3) for part in rest[:2]]
    found = past_sorting(*whole, block=block, count=count, temperature=temperature)
    place = mx.maximum(places - offset, 0)
    own = (place // block)[:, None]
    number = mx.broadcast_to(own, (place.shape[0], queries.shape[1], place.shape[1]))
    near = [
        (mx.take_along_axis(one, own, axis=2), mx.take_along_axis(weight, own, axis=2))
        for one, weight in found
    ]
    near.append((number + 1, mx.ones(number.shape)))
    keys, values = (
        mx.concatenate([_chosen(part, null, *one) for one in near], axis=3)
        for part, null in zip(rest[1:], empty, strict=True)
    )
    column = mx.arange(keys.shape[3]) - count * block
    seen = column <= (place % block)[:, None, :, None, None]
    later = attend_blocks(queries, keys, values, seen)
    return later if y is None else mx.where(asked >= offset, later, y)


def _chosen(blocks: mx.array, empty: mx.array, number: mx.array, weight: mx.array) -> mx.array:
    """Blocks `(B, H, N, S, K)` by their numbers, times their weights; number 0 is the empty one."""
    shape = (*blocks.shape[:2], 1, *blocks.shape[3:])
    first = mx.broadcast_to(empty[None, :, :, None], shape)
    flat = mx.flatten(mx.concatenate([first, blocks], axis=2), 3)
    found = mx.take_along_axis(flat, number[..., None], axis=2)
    return mx.unflatten(found * weight[..., None], 3, blocks.shape[3:])
