"""Kernels with instructions for matrices, which Mesa's compiler does not know: counted in their texts.

Clang unrolls the loops of a text for arm64 as the text asks. Of each kernel the innermost loop with
products is shown: its products of 8 x 8 matrices, its loads of them, and its barriers.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from mlx_mmfree.ops.inspection import kernel_texts
from tests.emulator import compiler


class Matrices(NamedTuple):
    """The cost of a round of a kernel's inner loop.

    Attributes:
        kind: The kernel.
        products, loads, barriers: How many.
    """

    kind: str
    products: int
    loads: int
    barriers: int


def counted() -> Iterator[Matrices]:
    """One kernel of each kind that has instructions for matrices, in the order of their texts."""
    chosen: dict[str, str] = {}
    for name, text in kernel_texts().items():
        if "simdgroup_multiply" in text:
            kind = re.split(r"__|_(?:b?float|uint)", name.removeprefix("custom_kernel_"))[0]
            chosen.setdefault(kind, text)
    codes = compiler.machine_codes(chosen.values())
    for kind, code in zip(chosen, codes, strict=True):
        yield in_text(kind, code)


def in_text(kind: str, code: str) -> Matrices:
    """The cost of the innermost loop with products; of several, the one with most."""
    found = compiler.loops_around(code, "simdgroup_multiply")
    loops = [[each.split()[0] for each in loop.instructions] for loop in found]
    names = max(loops, key=lambda names: names.count("simdgroup_multiply"))
    barriers = sum("barrier" in name for name in names)
    return Matrices(
        kind, names.count("simdgroup_multiply"), names.count("simdgroup_load"), barriers
    )


def report() -> str:
    lines = ["| kernel | products | loads | barriers |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| `{each[0]}` | {each[1]} | {each[2]} | {each[3]} |" for each in counted()]
    return "\n".join(lines)
