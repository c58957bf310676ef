"""How evenly the keys of a decoded token are spread over the cores of a GPU, and what a part costs."""

from typing import NamedTuple

from mlx_mmfree.ops.attention.metal_step import SIMD_GROUPS, parts_of
from mlx_mmfree.ops.backend.gpu_cores import MAX_CORES, OTHER_CORES, ULTRA_CORES
from tests.emulator import apple_gpu
from tests.emulator.attention_texts import text_of_attention

HEADS = (8, 12, 16, 20, 24, 32, 40)
KEYS = (512, 1024, 4096, 32768)
CORES = {8: OTHER_CORES, 20: OTHER_CORES, 40: MAX_CORES, 80: ULTRA_CORES}
"""Numbers of cores, each with the facts of its kind of chip."""


class Share(NamedTuple):
    """Attention of a token on a GPU of so many cores.

    Attributes:
        parts: The parts in which the keys of a head are read.
        busiest: Keys of the busiest core, of the mean.
        whole: The same where each head is read by one threadgroup.
    """

    parts: int
    busiest: float
    whole: float


def share(heads: int, keys: int, cores: int) -> Share:
    parts = parts_of(heads, keys, CORES[cores])

    def busiest(groups: int) -> float:
        return -(-groups // cores) * cores / groups

    return Share(parts, busiest(heads * parts), busiest(heads))


def report() -> str:
    """The instructions of a part, and a table of numbers of heads."""
    whole, part = (
        apple_gpu.machine_code(*text_of_attention(128, parts=parts), (32 * SIMD_GROUPS, 1, 1))
        for parts in (1, 2)
    )
    lines = [
        f"A SIMD group of {SIMD_GROUPS} takes {whole.outside.instructions} instructions beside its "
        f"keys, {part.outside.instructions} where a head is read in parts, and for a key of 128 dims "
        f"{whole.loops[1].instructions} and {part.loops[1].instructions}. Keys of the busiest core, of "
        "the mean:\n",
        "| heads, keys | " + " | ".join(f"{cores} cores" for cores in CORES) + " |",
        "| --- |" + " ---: |" * len(CORES),
    ]
    for heads in HEADS:
        for keys in KEYS:
            found = [share(heads, keys, cores) for cores in CORES]
            cells = [
                f"{each.busiest:.2f} in {each.parts} parts, {each.whole:.2f} whole"
                for each in found
            ]
            lines.append(f"| {heads}, {keys:,} | {' | '.join(cells)} |")
    return "\n".join(lines)
