"""Terms of attention's scores that depend on how far apart two positions are."""

import math
from copy import copy
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .arguments import check_sizes
from .partition import Group, part_of


class PositionBias(nn.Module):
    """A term that each head adds to the score of a query and a key, by their distance.

    Attention takes one as `position_bias=` and asks it for the positions that it sees.

    Shape:
        Integers `(B, L, N)`, the position of the key less that of the query; result float32
        `(B, H, L, N)`.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        check_sizes(type(self).__name__, num_heads=num_heads)
        self._num_heads = num_heads

    def check_fits(self, place: str, num_heads: int) -> None:
        """Refuses attention of another number of heads, with `ValueError`."""
        if num_heads != self._num_heads:
            raise ValueError(
                f"[{place}] 'position_bias' must be made for {num_heads} heads but got one for "
                f"{self._num_heads}."
            )

    def part(self, group: Group) -> "PositionBias":
        """That of this process' share of the heads."""
        part = copy(self)
        part._num_heads //= group.size()
        return part

    def __call__(self, relative: mx.array) -> mx.array:
        raise NotImplementedError


class ALiBi(PositionBias):
    r"""Attention with linear biases (Press et al., arXiv 2108.12409).

    .. math::
        b_{t,j,h} = -m_h\,|t - j|, \quad m_h = 2^{-8h/H}, \quad h = 1..H

    Where H is no power of 2, the largest power below it has these slopes, and the heads beyond take
    every second one of twice as many heads, as the published code and BLOOM do. BLOOM adds
    :math:`m_h\,j` instead, which gives the same weights under a causal mask.

    Args:
        num_heads: Query heads `H`.

    Shape: as `PositionBias`.

    Example:
        >>> ALiBi(4)(mx.array([[[-2, -1, 0]]]))[0, 0].tolist()
        [[-0.5, -0.25, -0.0]]
    """

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        known = 2 ** int(math.log2(num_heads))
        slopes = _slopes(known) + _slopes(2 * known)[::2]
        # underscored: no parameter
        self._slopes = mx.array(slopes[:num_heads])

    def part(self, group: Group) -> "ALiBi":
        part = cast(ALiBi, super().part(group))
        part._slopes = part_of(self._slopes, group)
        return part

    def __call__(self, relative: mx.array) -> mx.array:
        return -self._slopes[:, None, None] * mx.abs(relative)[:, None].astype(mx.float32)


def _slopes(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1)]


class RelativeBias(PositionBias):
    r"""A learned term for each bucket of distances (T5, Raffel et al., arXiv 1910.10683).

    Of R buckets for one direction, the first R/2 hold a distance each. The others hold ever more, on a
    logarithmic scale up to `max_distance`; all that is farther falls into the last. If attention sees
    both sides, each side has half of the buckets.

    Args:
        num_heads: Query heads `H`.
        num_buckets: The buckets of both directions together.
        max_distance: The distance from which all fall into the last bucket.
        is_causal: Keys behind the query share the bucket of distance 0.

    Shape: as `PositionBias`.

    Example:
        >>> RelativeBias(4)(mx.array([[[-2, -1, 0]]])).shape
        (1, 4, 1, 3)
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        is_causal: bool = True,
    ):
        super().__init__(num_heads)
        check_sizes("RelativeBias", num_buckets=num_buckets, max_distance=max_distance)
        sides = 1 if is_causal else 2
        if num_buckets % (2 * sides):
            raise ValueError(
                f"[RelativeBias] 'num_buckets' must be a multiple of {2 * sides} but got "
                f"{num_buckets}."
            )
        side = num_buckets // sides
        if max_distance <= side // 2:
            raise ValueError(
                f"[RelativeBias] 'max_distance' must be larger than {side // 2}, the distances with a "
                f"bucket of their own, but got {max_distance}."
            )
        self._is_causal = is_causal
        self._side = side
        # a table, so that no device's logarithm puts a distance into the bucket beside
        self._buckets = mx.array(_buckets(side, max_distance))
        self.weight = mx.random.normal((num_buckets, num_heads)) * 0.02

    def part(self, group: Group) -> "RelativeBias":
        part = cast(RelativeBias, super().part(group))
        part.weight = part_of(self.weight, group, axis=-1)
        return part

    def __call__(self, relative: mx.array) -> mx.array:
        distance = mx.maximum(-relative, 0) if self._is_causal else mx.abs(relative)
        bucket = self._buckets[mx.minimum(distance, self._buckets.size - 1)]
        if not self._is_causal:
            bucket = bucket + mx.where(relative > 0, self._side, 0)
        return mx.moveaxis(self.weight[bucket].astype(mx.float32), -1, 1)


def _buckets(count: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance from 0 to `max_distance`."""
    exact = count // 2
    distance = np.arange(max_distance + 1)
    share = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    # a share that is a whole number but for rounding belongs to the bucket that begins there
    far = exact + np.floor(share * (count - exact) + 1e-9).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, count - 1)).astype(np.int32)
