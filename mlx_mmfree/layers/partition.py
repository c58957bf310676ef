"""What a mixer says of how it can be divided between processes."""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

Group = mx.distributed.Group


class Partition(NamedTuple):
    """The parts of a mixer of which each process holds an equal share: some heads, or some channels.

    A projection divided by its outputs needs no word from the others; the one behind it is divided by
    its inputs, and its results are added up (Shoeybi et al., arXiv 1909.08053).

    Attributes:
        columns: The projections that are divided by their outputs, and of how many equal sections each
            consists: 2 where it holds gate and up one behind the other.
        rows: The projection that is divided by its inputs.
        norm: An RMSNorm over all of the divided channels.
        counts: Attributes that count heads or channels.
        arrays: Attributes with a row for each head or channel.
    """

    columns: Mapping[str, int]
    rows: str = "output_proj"
    norm: str | None = None
    counts: tuple[str, ...] = ("num_heads",)
    arrays: tuple[str, ...] = ()


QUERIES_KEYS_VALUES = {"query_proj": 1, "key_proj": 1, "value_proj": 1}


def own_share(count: int, group: Group) -> slice:
    """Which of so many things this process holds."""
    size = count // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


def part_of(array: mx.array, group: Group, sections: int = 1, axis: int = 0) -> mx.array:
    """This process' share of each section of an axis, as an array of its own."""
    rows = mx.arange(array.shape[axis]).reshape(sections, group.size(), -1)[:, group.rank()]
    return mx.take(array, rows.flatten(), axis=axis)
