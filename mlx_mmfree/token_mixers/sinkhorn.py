"""Sinkhorn attention: blocks see themselves and a sorted block (Tay et al., arXiv 2002.11296)."""

from functools import partial
from typing import Any, ClassVar

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
from ..layers.mixing.block_sorting import (
    attend_blocks,
    attend_past_blocks,
    blocks_of,
    soft_sorting,
)
from ..layers.padding import RealTokens
from ..layers.partition import QUERIES_KEYS_VALUES, Group, Partition, own_share

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")


class Sinkhorn(KeyValueMixer):
    r"""Softmax attention within blocks, each beside a block that a sorting puts there.

    .. math::
        y_t = W_o\,\Big[\mathrm{softmax}\big(q_t\,[\hat K_u; K_u]^\top / \sqrt K\big)\,[\hat V_u; V_u]
        \Big]_{h=1..H}, \quad \hat K_u = \sum_v P_{uv} K_v, \quad \hat V_u = \sum_v P_{uv} V_v

    for the block `u` of `t`. If it is not causal, `P` is a soft permutation, by Gumbel-Sinkhorn of the
    products of the blocks' mean queries and keys, as sinkhorn-transformer has it (which, as released,
    takes the sorted values from the sorted keys; this does not). If it is causal, it is that package's
    form, not the paper's: a block sees the few blocks of the past that its first token finds nearest,
    times their weights, or learned empty blocks where there are too few; in half of the heads blocks
    begin a token before those of the others, and what comes before the first of them sees only itself.

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
        linear: Linears = nn.Linear,
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
        self._is_causal = is_causal
        self.num_heads = num_heads
        self._first_heads = num_heads // 2
        self.head_dim = head_dim
        for name in _PROJECTIONS:
            self[name] = factory_of(linear, name)(dims, num_heads * head_dim, bias=False)
        self.output_proj = factory_of(linear, "output_proj")(num_heads * head_dim, dims, bias=False)
        if is_causal:
            self.empty_keys = mx.random.normal((num_heads, 1, head_dim))
            self.empty_values = mx.random.normal((num_heads, 1, head_dim))

    def take_part(self, group: Group) -> None:
        own = own_share(self.num_heads, group)
        self._first_heads = len(range(own.start, min(self._first_heads, own.stop)))

    @property
    def held_dims(self) -> tuple[int, int, int]:
        return self.num_heads, 2 * self.head_dim, self.head_dim

    def __call__(
        self,
        x: mx.array,
        state: HeldTokens | None = None,
        valid: mx.array | None = None,
        *,
        uniform: mx.array | None = None,
    ) -> tuple[mx.array, HeldTokens]:
        return self.read_tokens(x, state, Context(valid), partial(self._mix, uniform))

    def _mix(
        self, uniform: mx.array | None, x: mx.array, before: HeldTokens, tokens: RealTokens
    ) -> tuple[mx.array, HeldTokens]:
        projected = project(x, [self[name] for name in _PROJECTIONS])
        heads = split_heads(projected, 3 * self.num_heads)
        parts = [heads[:, n * self.num_heads : (n + 1) * self.num_heads] for n in range(3)]
        after: HeldTokens = ()
        if isinstance(before, KeyValueState):
            y, after = self._see_past(parts, before, tokens.counts, self.empty_values)
        else:
            y = self._see_all(parts, tokens.counts, uniform)
        return project(merge_heads(y).astype(x.dtype), (self["output_proj"],)), after

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        """Those of tokens; what empty blocks add to a causal mixer's result is left out."""
        self.check_tokens(x)
        queries, keys = (
            split_heads(self[name](x), self.num_heads).astype(mx.float32)
            for name in _PROJECTIONS[:2]
        )
        batch, heads, length, dims = keys.shape
        parts = [queries, keys, one_hot_values(batch, heads, length)]
        if not self._is_causal:
            return self._see_all(parts, None, None)
        before = KeyValueState.empty(batch, heads, 2 * dims, length, mx.float32)
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
        # a place of a block is there if any block has a token at it
        places = mx.broadcast_to(mx.any(real, axis=2, keepdims=True), real.shape)
        seen = mx.concatenate([places, real], axis=-1)[..., None, :]
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
        places = None
        # few tokens look for their own blocks, many let all blocks be computed
        is_few = length * self._block <= keys.shape[2]
        if before.used:
            # padding behind the tokens has no slot, and any place does
            places = mx.minimum(reading.places, keys.shape[2] - 1)
            places = mx.broadcast_to(places, (keys.shape[0], length))
        groups = [
            attend_past_blocks(
                [part[n] for part in split],
                [part[n] for part in empty],
                block=self._block,
                offset=offset,
                count=self._num_blocks,
                temperature=self._temperature,
                places=places if is_few else None,
            )
            for n, offset in enumerate((0, self._block - 1))
            if split[0][n].shape[1]
        ]
        y = mx.concatenate(groups, axis=1)
        if places is not None and not is_few:
            y = mx.take_along_axis(y, places[:, None, :, None], axis=2)
        return y, after
