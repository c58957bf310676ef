"""Big Bird: blocks that are near, global or random (Zaheer et al., arXiv 2007.14062)."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import mlx.core as mx
import numpy as np

from ..layers.arguments import check_counts, check_sequences, check_sizes, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, one_hot_values, split_heads
from ..layers.mixer import (
    QUERIES_KEYS_VALUES,
    Group,
    Linears,
    Partition,
    TokenMixer,
    own_share,
)
from ..ops import attention

PlanFunction = Callable[[int], np.ndarray]
PlanName = Literal["drawn", "released"]

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class BigBird(TokenMixer):
    r"""Softmax attention in which each block of tokens sees few blocks, some of them random.

    .. math::
        y_t = W_o\,\Big[\sum_{j \in N_h(t)} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,h} / \sqrt{K}\big)\,
        v_{j,h}\Big]_{h=1..H}

    With `n` blocks, :math:`N_h` of a token in block `i` are the blocks `0`, `i - 1`, `i`, `i + 1`,
    `n - 1` and `r` random ones of the head; the first and the last block see everything. This is the
    "internal" format, ITC. Up to :math:`(5 + 2r) S` tokens all are seen, as in the published code, but
    with a plan of one's own only up to two blocks. Blocks count over a call with its padding, which
    none sees, after the tokens: the last one may hold padding alone.

    A plan says which blocks are random. "drawn" draws them anew for each number of blocks, always the
    same ones, from the blocks that a block does not see anyway. "released" does what transformers does:
    drawn in training, but in evaluation every random block is block 0, which then counts `r` times
    more. Checkpoints of BigBird that were evaluated there give the same here only with "released".

    Source: Zaheer et al., arXiv 2007.14062.

    Args:
        dims: Model dims `D`.
        block_size: Tokens `S` of a block.
        num_random: Random blocks `r`.
        plan: "drawn", "released", or a function of the number of blocks `n` that returns the random
            blocks of blocks 1 to `n - 2`, integers `(H, n - 2, r)`. A block given twice counts twice.
        seed: What random blocks are drawn with.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `()`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The plan is unknown, or does not fit.

    Example:
        >>> BigBird(32, block_size=2, num_random=1)(mx.zeros((1, 20, 32)))[0].shape
        (1, 20, 32)
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V, over near, global and random blocks"
    complexity: ClassVar[str] = "T (5 + r) S D"
    paper: ClassVar[str] = "arXiv 2007.14062"
    bidirectional: ClassVar[bool] = True
    padding_last: ClassVar[bool] = True
    partition = Partition(QUERIES_KEYS_VALUES)

    def __init__(
        self,
        dims: int,
        *,
        block_size: int = 64,
        num_random: int = 3,
        plan: PlanName | PlanFunction = "drawn",
        seed: int = 0,
        num_heads: int = 8,
        head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
    ):
        super().__init__()
        check_sizes("BigBird", block_size=block_size)
        check_counts("BigBird", num_random=num_random, seed=seed)
        if isinstance(plan, str) and plan not in get_args(PlanName):
            known = ", ".join(map(repr, get_args(PlanName)))
            raise ValueError(
                f"[BigBird] 'plan' must be a function or one of {known} but got {plan!r}."
            )
        head_dim = dims_of_a_head("BigBird", dims, num_heads, head_dim)
        self._dims = dims
        self.num_heads = num_heads
        self._drawn_heads, self._own_heads = num_heads, slice(num_heads)
        self._size = block_size
        self._num_random = num_random
        self._plan = plan
        self._seed = seed
        inner = {name: [num_heads * head_dim] for name in _PROJECTIONS}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(num_heads * head_dim, dims, linear, bias=bias)

    def take_part(self, group: Group) -> None:
        self._own_heads = own_share(self.num_heads, group)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def random_blocks(self, count: int) -> np.ndarray:
        """The random blocks of blocks 1 to `count - 2`, integers `(H, count - 2, r)`."""
        shape = (self._drawn_heads, count - 2, self._num_random)
        if not isinstance(self._plan, str):
            blocks = np.asarray(self._plan(count))
            if blocks.shape != shape or blocks.min(initial=0) < 0 or blocks.max(initial=0) >= count:
                raise ValueError(
                    f"[BigBird] 'plan' must return blocks from 0 to {count - 1} of shape {shape} but "
                    f"got shape {blocks.shape}."
                )
            return blocks
        if self._plan == "released" and not self.training:
            return np.zeros(shape, np.int64)
        rng = np.random.default_rng((self._seed, count))
        own, block = np.arange(1, count - 1)[:, None], np.arange(count)
        is_seen = (np.abs(own - block) <= 1) | (block == 0) | (block == count - 1)
        # the smallest of random numbers stand where no block is seen already
        drawn = rng.random((self._drawn_heads, count - 2, count)) + is_seen
        return np.argsort(drawn, axis=-1)[..., : self._num_random]

    def mix(
        self, q: mx.array, k: mx.array, v: mx.array, state: tuple[()], context: Context
    ) -> tuple[mx.array, tuple[()]]:
        q, k, v = (split_heads(part, self.num_heads) for part in (q, k, v))
        return merge_heads(self._attend(q, k, v, context.counts)), ()

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("BigBird", x, self._dims)
        q, k, _ = (
            split_heads(part, self.num_heads).astype(mx.float32)
            for part in self.apart(self.project(x))
        )
        return self._attend(q, k, one_hot_values(*k.shape[:3]), None)

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, counts: mx.array | None
    ) -> mx.array:
        """Attention between the projections, `(B, H, L, V)`."""
        batch, _, length, _ = queries.shape
        real = mx.full((batch,), length) if counts is None else mx.maximum(counts, 1)
        enough = 5 + 2 * self._num_random if isinstance(self._plan, str) else 2
        if length <= enough * self._size:
            seen = None if counts is None else (mx.arange(length) < real[:, None])[:, None, None]
            return attention(queries, keys, values, seen)
        missing = -length % self._size
        q, k, v = (
            mx.pad(part, [(0, 0), (0, 0), (0, missing), (0, 0)]) for part in (queries, keys, values)
        )
        return self._in_blocks(q, k, v, real)[:, :, :length]

    def _in_blocks(self, q: mx.array, k: mx.array, v: mx.array, real: mx.array) -> mx.array:
        """Attention of whole blocks, `(B, H, L, K)`, of which so many tokens are real."""
        size = self._size
        seen = mx.arange(q.shape[2]) < real[:, None]
        ends = mx.concatenate([q[:, :, :size], q[:, :, -size:]], axis=2)
        first, last = mx.split(attention(ends, k, v, seen[:, None, None]), 2, axis=2)
        return mx.concatenate([first, self._middle(q, k, v, seen), last], axis=2)

    def _middle(self, q: mx.array, k: mx.array, v: mx.array, seen: mx.array) -> mx.array:
        """Attention of all blocks but the first and the last."""
        size, (batch, heads, length, _) = self._size, q.shape
        count = length // size
        own = np.arange(1, count - 1)
        ends = (np.zeros_like(own), np.full_like(own, count - 1))
        fixed = np.stack([ends[0], own - 1, own, own + 1, ends[1]], axis=-1)
        # beside an end, the neighbour is the end that is seen anyway
        counts = np.ones((count - 2, 5 + self._num_random), bool)
        counts[0, 1] = counts[-1, 3] = False
        drawn = self.random_blocks(count)[self._own_heads]
        blocks = np.concatenate([np.broadcast_to(fixed, (heads, *fixed.shape)), drawn], axis=-1)

        def near(x: mx.array) -> mx.array:
            """The blocks that each block of each head sees, each a row, `(B H (n - 2), 1, N, K)`."""
            rows = x.reshape(batch, heads * count, -1)
            index = mx.array((np.arange(heads)[:, None, None] * count + blocks).reshape(-1))
            return rows[:, index].reshape(batch * heads * (count - 2), 1, -1, x.shape[-1])

        in_heads = mx.broadcast_to(seen[:, None, :, None], (batch, heads, length, 1))
        is_counted = mx.repeat(mx.array(counts), size, axis=1)
        mask = near(in_heads).reshape(batch * heads, count - 2, -1)
        mask = mx.logical_and(mask, is_counted).reshape(-1, 1, 1, is_counted.shape[-1])
        queries = q[:, :, size:-size].reshape(-1, 1, size, q.shape[-1])
        y = attention(queries, near(k), near(v), mask)
        return y.reshape(batch, heads, length - 2 * size, -1)
