"""Which text of the kernel for some tens of rows computes a call, chosen by counts of instructions.

More outputs of a SIMD group take fewer instructions each, and fewer outputs of a threadgroup fill more
cores: the choice is what the busiest core of a chip has least work with.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..backend import launch
from ..backend.gpu_cores import cores
from ..backend.metal_functions import keeps_half_denormals
from ..ternary import CODES_PER_WORD
from ..ternary_matmul.definition import MOST_CODES
from .definition import Variant

SIMD_GROUPS = (4, 8)
"""SIMD groups of a threadgroup: as many for each of the 4 schedulers of a core."""

MOST_OUTPUTS = {1: 10, 2: 8}
"""The most outputs of a SIMD group, by the rows of a group. With more sums, fewer threads run."""

MOST_OUTPUTS_OF_MORE_ROWS = 4


class Tuning(NamedTuple):
    """The options that select the text of a launch, beside its format.

    Attributes:
        rows: Rows of a group, which share the packed words that are read.
        outputs: Outputs of a SIMD group.
        simd_groups: SIMD groups of a threadgroup.
        are_halves: Whether codes are taken from packed words as halves.
        is_whole: Whether the inputs of a row fill its packed words.
    """

    rows: int
    outputs: int
    simd_groups: int
    are_halves: bool
    is_whole: bool

    @classmethod
    def of(cls, variant: Variant, rows: int, dims: int, outputs: Sequence[int]) -> "Tuning":
        """The options for a number of rows of `dims` inputs, and for the outputs of each matrix."""
        group_rows = launch.rows_of_a_group(rows)
        is_alone = rows <= group_rows
        own, simd_groups = _shape(
            variant, group_rows, is_alone, dims, tuple(outputs), tuple(cores())
        )
        are_halves = variant.quantize and dims <= MOST_CODES and keeps_half_denormals()
        return cls(group_rows, own, simd_groups, are_halves, dims % CODES_PER_WORD == 0)


# each launch asks for it, and finding it takes tens of microseconds
@lru_cache(maxsize=4096)
def _shape(
    variant: Variant,
    rows: int,
    is_alone: bool,
    dims: int,
    outputs: tuple[int, ...],
    core_counts: tuple[int, ...],
) -> tuple[int, int]:
    """The outputs of a SIMD group and the SIMD groups of a threadgroup with the least work."""

    def work(choice: tuple[int, int]) -> float:
        """Instructions of the busiest core, as a mean of the numbers of cores that there may be."""
        own, simd_groups = choice
        each = instructions(variant, rows, dims, own, simd_groups)
        # several groups of rows are taken to fill a GPU, so that all of them have the same text
        if not is_alone:
            return each / (own * simd_groups)
        threadgroups = blocks(outputs, own * simd_groups)
        return each * sum(-(-threadgroups // count) * count for count in core_counts)

    most = min(MOST_OUTPUTS.get(rows, MOST_OUTPUTS_OF_MORE_ROWS), *outputs)
    return min(((own, count) for own in range(1, most + 1) for count in SIMD_GROUPS), key=work)


def blocks(outputs: Sequence[int], outputs_of_block: int) -> int:
    """The threadgroups of all matrices for a group of rows."""
    return sum(-(-count // outputs_of_block) for count in outputs)


def slab_words(variant: Variant, rows: int) -> int:
    """The packed words of a row whose inputs lie in threadgroup memory at once, as halves or floats."""
    words = 128 // rows * (2 if variant.quantize else 1)
    return max(words // launch.SIMD_GROUP, 1) * launch.SIMD_GROUP


def instructions(variant: Variant, rows: int, dims: int, outputs: int, simd_groups: int) -> float:
    """About how many instructions a threadgroup takes for a group of rows.

    Straight lines through the counts of `tests/emulator/counts/bit_linear.py`, which a test compares:
    what a SIMD group takes once, for each slab, and for each 32 words; and what a threadgroup takes for
    each 128 inputs to find their statistics, and to lay them out.
    """
    words, slab = -(-dims // CODES_PER_WORD), slab_words(variant, rows)
    slabs = -(-words // slab)
    rounds = -(-words // launch.SIMD_GROUP)
    has_norm = variant.eps is not None or variant.norm_eps is not None
    once = 60 + 36 * rows + 6.5 * rows * outputs + 20 * slabs + 30 * rows * has_norm
    products = 7 + 8 * rows + (11 + 16 * rows) * outputs
    inputs = 12 + (33 + 13 * has_norm + 60 * (variant.gate is not None)) * rows
    return simd_groups * (once + rounds * products) + inputs * dims / 128
