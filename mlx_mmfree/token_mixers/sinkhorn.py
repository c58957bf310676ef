"""Sinkhorn attention: blocks see themselves and a sorted block (Tay et al., arXiv 2002.11296)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from ..layers.arguments import check_sizes, dims_of_a_head
from ..layers.attention.key_values import KeyValueKind, KeyValueState, extend, read
from ..layers.attention.options import KeyValueCache
from ..layers.cached_tokens import CachedTokens, KeyValueMixer
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, one_hot_values, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Group, Linears, Partition, own_share
from ..ops import linear_scan

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
    r"""Which share of each block stands at each index, by Gumbel-Sinkhorn of products of means.

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
        index = mx.argmax(mx.stop_gradient(scores), axis=-1, keepdims=True).astype(mx.int32)
        weight = mx.take_along_axis(mx.softmax(scores, axis=-1), index, axis=-1)
        found.append((mx.maximum(index - count + 1, 0)[..., 0], weight[..., 0]))
        scores = mx.where(column == index, -mx.inf, scores)
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
    asked: mx.array | None = None,
) -> mx.array:
    """Attention of each token to its block up to itself, and to blocks before that `past_sorting` finds.

    Args:
        parts: Queries, keys and values, float32 `(B, H, L, K)`.
        empty: Key and value of an empty block, `(H, 1, K)`.
        block: Tokens `S` of a block.
        offset: The first token of the first block. Those before it see only each other.
        count: Blocks that are found.
        temperature: That of the sorting.
        asked: The tokens whose results are asked for, `(B, A)`; `None`: all.

    Returns:
        float32 `(B, H, L, V)`, or `(B, H, A, V)`.
    """
    if asked is not None:
        return _attend_past_of(
            parts,
            empty,
            asked,
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
    positions: mx.array,
    *,
    block: int,
    offset: int,
    count: int,
    temperature: float,
) -> mx.array:
    """`attend_past_blocks` of some tokens, each with the keys and values of its own blocks."""
    asked = positions[:, None, :, None]
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
    position = mx.maximum(positions - offset, 0)
    own = (position // block)[:, None]
    number = mx.broadcast_to(own, (position.shape[0], queries.shape[1], position.shape[1]))
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
    seen = column <= (position % block)[:, None, :, None, None]
    later = attend_blocks(queries, keys, values, seen)
    return later if y is None else mx.where(asked >= offset, later, y)


def _chosen(blocks: mx.array, empty: mx.array, number: mx.array, weight: mx.array) -> mx.array:
    """Blocks `(B, H, N, S, K)` by their numbers, times their weights; number 0 is the empty one."""
    shape = (*blocks.shape[:2], 1, *blocks.shape[3:])
    first = mx.broadcast_to(empty[None, :, :, None], shape)
    flat = mx.flatten(mx.concatenate([first, blocks], axis=2), 3)
    found = mx.take_along_axis(flat, number[..., None], axis=2)
    return mx.unflatten(found * weight[..., None], 3, blocks.shape[3:])


_PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class Sinkhorn(KeyValueMixer):
    r"""Softmax attention within blocks, each beside a block that a sorting puts there.

    .. math::
        y_t = W_o\,\Big[\mathrm{softmax}\big(q_t\,[\hat K_u; K_u]^\top / \sqrt K\big)\,[\hat V_u; V_u]
        \Big]_{h=1..H}, \quad \hat K_u = \sum_v P_{uv} K_v, \quad \hat V_u = \sum_v P_{uv} V_v

    for the block `u` of `t`. If it is not causal, `P` is a soft permutation, by Gumbel-Sinkhorn of the
    products of the blocks' mean queries and keys, as sinkhorn-transformer has it (which, as released,
    takes the sorted values from the sorted keys; this does not). If it is causal, it is that package's
    format, not the paper's: a block sees the few blocks of the past that its first token finds nearest,
    times their weights, or learned empty blocks where there are too few; in half of the heads blocks
    begin a token earlier than in the others, and what comes before the first of them sees only itself.

    Source: Tay et al., arXiv 2002.11296.

    Args:
        dims: Model dims `D`.
        block_size: Tokens of a block.
        iterations: Those of Sinkhorn.
        num_blocks: Blocks of the past that a causal one sees.
        temperature: Of the sorting. Default: 0.75, or 1 if it is causal.
        has_noise: Gumbel noise is drawn while the module is in training, if it is not causal.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_causal: Later tokens are not seen.

    Shape:
        `x` and `y`: `(B, L, D)`; `uniform`: numbers from 0 to 1 that the noise is made of,
        `(B, H, N, N)` for `N` blocks.

    State:
        `KeyValueState`, whose keys are keys and queries side by side; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, an input has other dims,
            or the temperature is not positive.

    Example:
        >>> Sinkhorn(32, block_size=4)(mx.zeros((1, 9, 32)))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "y = softmax(Q [P K; K]^T / sqrt(d)) [P V; V], over the own block"
    complexity: ClassVar[str] = "T S D + (T / S)^2 D"
    paper: ClassVar[str] = "arXiv 2002.11296"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    partition = Partition(QUERIES_KEYS_VALUES, arrays=("empty_keys", "empty_values"))

    def __init__(
        self,
        dims: int,
        *,
        block_size: int = 64,
        iterations: int = 7,
        num_blocks: int = 2,
        temperature: float | None = None,
        has_noise: bool = False,
        num_heads: int = 8,
        head_dim: int | None = None,
        linear: Linears = Linear,
        is_causal: bool = True,
    ):
        super().__init__()
        check_sizes("Sinkhorn", block_size=block_size, iterations=iterations, num_blocks=num_blocks)
        default = 1.0 if is_causal else 0.75
        self._temperature = default if temperature is None else temperature
        if not self._temperature > 0:
            raise ValueError(f"[Sinkhorn] 'temperature' must be positive but got {temperature}.")
        head_dim = dims_of_a_head("Sinkhorn", dims, num_heads, head_dim)
        self._dims = dims
        self._block = block_size
        self._iterations = iterations
        self._num_blocks = num_blocks
        self._has_noise = has_noise
        self.is_causal = is_causal
        self.num_heads = num_heads
        self._first_heads = num_heads // 2
        self.head_dim = head_dim
        inner = {name: [num_heads * head_dim] for name in QUERIES_KEYS_VALUES}
        self.make_projections(dims, inner, linear)
        self.make_output(num_heads * head_dim, dims, linear)
        if is_causal:
            self.empty_keys = mx.random.normal((num_heads, 1, head_dim))
            self.empty_values = mx.random.normal((num_heads, 1, head_dim))

    def take_part(self, group: Group) -> None:
        own = own_share(self.num_heads, group)
        self._first_heads = len(range(own.start, min(self._first_heads, own.stop)))

    @property
    def cached_dims(self) -> tuple[int, int, int]:
        return self.num_heads, 2 * self.head_dim, self.head_dim

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        state: CachedTokens,
        context: Context,
        *,
        uniform: mx.array | None = None,
    ) -> tuple[mx.array, CachedTokens]:
        heads = [split_heads(part, self.num_heads) for part in (q, k, v)]
        if not isinstance(state, KeyValueState):
            return merge_heads(self._see_all(heads, context.counts, uniform)), state
        y, state = self._see_past(heads, state, context.counts, self.empty_values)
        return merge_heads(y), state

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        """Mixing weights of tokens, without what empty blocks add to a causal mixer's result."""
        self.check_tokens(x)
        queries, keys, _ = (
            split_heads(part, self.num_heads).astype(mx.float32)
            for part in self.apart(self.project(x))
        )
        batch, heads, length, dims = keys.shape
        parts = [queries, keys, one_hot_values(batch, heads, length)]
        if not self.is_causal:
            return self._see_all(parts, None, None)
        kind = KeyValueKind(heads, 2 * dims, KeyValueCache(), False, value_dims=length)
        before = kind.blank(batch, 0, mx.float32)
        return self._see_past(parts, before, None, mx.zeros((heads, 1, length)))[0]

    def _see_all(
        self, parts: list[mx.array], counts: mx.array | None, uniform: mx.array | None
    ) -> mx.array:
        """Attention of whole sequences, float32 `(B, H, L, K)`."""
        length = parts[0].shape[2]
        block = min(self._block, length)
        queries, keys, values = (blocks_of(part, block) for part in parts)
        token = mx.arange(queries.shape[2] * block)[None]
        real = token < (mx.array([length]) if counts is None else counts)[:, None]
        real = real.reshape(-1, 1, *queries.shape[2:4])
        queries, keys, values = (
            mx.where(real[..., None], part, 0.0) for part in (queries, keys, values)
        )
        if uniform is None and self._has_noise and self.training:
            uniform = mx.random.uniform(shape=(*queries.shape[:2], *[queries.shape[2]] * 2))
        shares = soft_sorting(
            queries,
            keys,
            real,
            temperature=self._temperature,
            iterations=self._iterations,
            uniform=uniform,
        )
        sorted_keys, sorted_values = (
            mx.unflatten(shares @ mx.flatten(part, 3), 3, part.shape[3:]) for part in (keys, values)
        )
        # an index within a block counts if any block has a token there
        has_tokens = mx.broadcast_to(mx.any(real, axis=2, keepdims=True), real.shape)
        seen = mx.concatenate([has_tokens, real], axis=-1)[..., None, :]
        # padding alone sees itself, so that its gradient is a number
        seen = mx.logical_or(seen, mx.logical_not(mx.any(seen, axis=-1, keepdims=True)))
        keys = mx.concatenate([sorted_keys, keys], axis=3)
        values = mx.concatenate([sorted_values, values], axis=3)
        return attend_blocks(queries, keys, values, seen)[:, :, :length]

    def _see_past(
        self,
        parts: list[mx.array],
        before: KeyValueState,
        counts: mx.array | None,
        empty_values: mx.array,
    ) -> tuple[mx.array, KeyValueState]:
        """Attention of tokens to those before them, float32 `(B, H, L, V)`, and the state."""
        queries, keys, values = parts
        length = queries.shape[2]
        reading = read(before.positions, length, counts)
        both = mx.concatenate([keys, queries], axis=-1)
        both, values, after = extend(before, both, values, reading)
        keys, queries = mx.split(both, 2, axis=-1)
        first = self._first_heads
        split = [
            mx.split(part.astype(mx.float32), [first], axis=1) for part in (queries, keys, values)
        ]
        empty = [
            mx.split(part.astype(mx.float32), [first]) for part in (self.empty_keys, empty_values)
        ]
        asked = None
        # few tokens look for their own blocks, many let all blocks be computed
        is_few = length * self._block <= keys.shape[2]
        if before.used:
            # padding after the tokens has no slot, and any index does
            asked = mx.minimum(reading.token_positions, keys.shape[2] - 1)
            asked = mx.broadcast_to(asked, (keys.shape[0], length))
        groups = [
            attend_past_blocks(
                [part[n] for part in split],
                [part[n] for part in empty],
                block=self._block,
                offset=offset,
                count=self._num_blocks,
                temperature=self._temperature,
                asked=asked if is_few else None,
            )
            for n, offset in enumerate((0, self._block - 1))
            if split[0][n].shape[1]
        ]
        y = mx.concatenate(groups, axis=1)
        if asked is not None and not is_few:
            y = mx.take_along_axis(y, asked[:, None, :, None], axis=2)
        return y, after
