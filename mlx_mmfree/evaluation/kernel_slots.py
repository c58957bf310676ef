"""The slots of issue that the Metal kernels of products take for one row, counted in machine code.

`kernel_slots.json` holds the counts. `python -m tests.emulator.yardstick --write` makes it from the
texts of the kernels, and a test compares it with them.
"""

import json
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("kernel_slots.json")
_LANES = 32


class KernelSlots(NamedTuple):
    """The slots of a SIMD group, in which one instruction of 32 bits takes one.

    Attributes:
        product: What it computes: the operation, for codes with their bits.
        outputs: Those of a SIMD group.
        simd_groups: Those of a threadgroup.
        outside: Slots outside of loops.
        each: Slots for each input of a row, in loops that all SIMD groups of a threadgroup share.
        rounds: Slots of a round of each other loop, by the inputs of a row that a round takes.
    """

    product: str
    outputs: int
    simd_groups: int
    outside: int
    each: float
    rounds: dict[int, int]

    def of_a_simd_group(self, dims: int) -> float:
        """Slots of a SIMD group for a row of so many inputs."""
        rounds = sum(ceil(dims / inputs) * slots for inputs, slots in self.rounds.items())
        return self.outside + self.each * dims + rounds

    def of_all_lanes(self, dims: int, outputs: int) -> float:
        """Slots of all lanes for a matrix of so many inputs and outputs."""
        threadgroups = ceil(outputs / (self.outputs * self.simd_groups))
        return threadgroups * self.simd_groups * _LANES * self.of_a_simd_group(dims)


@cache
def kernel_slots() -> list[KernelSlots]:
    """The counts that the package holds."""
    kernels = json.loads(FILE.read_text(encoding="utf-8"))
    return [
        KernelSlots(**kernel | {"rounds": {int(n): slots for n, slots in kernel["rounds"].items()}})
        for kernel in kernels
    ]


def fewest_slots(product: str, dims: int, outputs: int) -> float:
    """The slots of all lanes in the kernel that takes fewest for a product; 0 if none was counted."""
    found = (
        kernel.of_all_lanes(dims, outputs) for kernel in kernel_slots() if kernel.product == product
    )
    return min(found, default=0)
