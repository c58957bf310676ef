"""The slots of issue that the Metal kernels of products take for one row, counted in machine code.

`kernel_slots.json` holds the counts. `python -m tests.emulator.yardstick --write` makes it from the
texts of the kernels, and a test compares it with them.
"""

import json
from collections.abc import Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("kernel_slots.json")
_LANES = 32


class Around(NamedTuple):
    """Slots that a kernel takes for a gate and norms before its product.

    Attributes:
        what: What they are, as `Product.around` has them.
        outside: Slots of a SIMD group outside of loops, beyond those without gate and norms.
        each: Slots of a threadgroup for each input of a row.
    """

    what: str
    outside: int
    each: float


class KernelSlots(NamedTuple):
    """The slots of a SIMD group, in which one instruction of 32 bits takes one.

    Attributes:
        product: What it computes: the operation, for codes with their bits.
        outputs: Those of a SIMD group.
        simd_groups: What a threadgroup may have of them.
        outside: Slots outside of loops.
        rounds: Slots of a round of each loop, by the inputs of a row that a round takes.
    """

    product: str
    outputs: int
    simd_groups: Sequence[int]
    outside: int
    rounds: dict[int, int]

    def of_a_simd_group(self, dims: int) -> float:
        """The slots of a SIMD group for a row of so many inputs, without gates and norms."""
        return self.outside + sum(
            ceil(dims / inputs) * slots for inputs, slots in self.rounds.items()
        )

    def of_all_lanes(self, dims: int, outputs: int, around: Around | None = None) -> float:
        """The fewest of all lanes for a matrix of so many inputs and outputs."""
        own, shared = self.of_a_simd_group(dims), 0.0
        if around is not None:
            own, shared = own + around.outside, around.each * dims
        found = (
            ceil(outputs / (self.outputs * count)) * (count * own + shared)
            for count in self.simd_groups
        )
        return min(found) * _LANES


class Counts(NamedTuple):
    """The counts that the package holds."""

    kernels: list[KernelSlots]
    around: dict[str, Around]


@cache
def counts() -> Counts:
    """Reads them from their file."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    kernels = [
        KernelSlots(**kernel | {"rounds": {int(n): slots for n, slots in kernel["rounds"].items()}})
        for kernel in read["kernels"]
    ]
    return Counts(kernels, {each["what"]: Around(**each) for each in read["around"]})


def fewest_slots(product: str, dims: int, outputs: int, around: str | None = None) -> float:
    """The slots of all lanes in the kernel that takes fewest for a product; 0 if none was counted.

    Args:
        product: What is computed, as `KernelSlots` has it.
        dims: The inputs of a row.
        outputs: Those of the matrix.
        around: The gate and norms before the product; `None` if it takes its input as it is.
    """
    kernels, known = counts()
    found = (
        kernel.of_all_lanes(dims, outputs, None if around is None else known[around])
        for kernel in kernels
        if kernel.product == product
    )
    return min(found, default=0)
