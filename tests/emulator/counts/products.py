"""What the kernels of products take for one row, as the bounds of `mmfree bench --bound` have it."""

import json
from collections.abc import Iterator

from mlx_mmfree.evaluation.kernel_slots import KernelSlots, kernel_slots
from mlx_mmfree.ops.backend.metal_gathered import OUTPUTS
from mlx_mmfree.ops.bit_linear.metal_groups import SIMD_GROUPS
from mlx_mmfree.ops.inspection import kernel_texts
from tests.emulator import apple_gpu
from tests.emulator.counts import bit_linear, codes

SHAPES = ((1024, 1024), (2560, 2560), (4096, 4096), (5120, 17408), (17408, 5120))
"""Inputs and outputs for which `report` shows the counts."""


def counted() -> Iterator[KernelSlots]:
    """Counts the kernels anew."""
    for outputs in (4, 8):
        yield of_bit_linear(outputs)
    texts = kernel_texts()
    for product, part, outputs, loops in (
        # a second loop is of the last inputs of a row
        ("TernaryMatmul", "ternary_matmul_decode__1_1_1_float16_t_", 4, 1),
        # not sorted: the matrix of each row is kept in one loop, and multiplied in another
        ("GatherTernaryMatmul", "gather_ternary_matmul__2_2_0_1_1_1_0_1_float16_t_", OUTPUTS, 2),
    ):
        name, text = next(each for each in texts.items() if part in each[0])
        code = apple_gpu.machine_code(name, text, (64, 1, 1))
        slots = sum(loop.slots for loop in code.loops[:loops])
        yield KernelSlots(product, outputs, 2, code.outside.slots, 0, {512: slots})
    for bits in codes.metal.BITS:
        for outputs in (4, 8):
            code = codes.own(bits, 1, outputs).code
            product = f"codes of {bits} bit{'s' * (bits > 1)}"
            yield KernelSlots(product, outputs, 2, code.outside.slots, 0, {1024: code.hot.slots})


def of_bit_linear(outputs: int) -> KernelSlots:
    """Of one row that is quantised, without gate and norms."""
    counted = bit_linear.of(1, outputs)
    *statistics, slab, filling, products = counted.code.loops
    each = sum(loop.slots for loop in (*statistics, filling)) / bit_linear.FILLED_INPUTS
    rounds = {16 * counted.slab: slab.slots, 512: products.slots}
    return KernelSlots("BitLinear", outputs, SIMD_GROUPS, counted.code.outside.slots, each, rounds)


def as_json(kernels: list[KernelSlots]) -> str:
    """The counts as the package holds them."""
    return json.dumps([kernel._asdict() for kernel in kernels], indent=1) + "\n"


def report() -> str:
    """Slots for each weight at some shapes, from the counts that the package holds."""
    shapes = " | ".join(f"{dims} x {outputs}" for dims, outputs in SHAPES)
    lines = [f"| kernel | {shapes} |", f"| --- |{' ---: |' * len(SHAPES)}"]
    for kernel in kernel_slots():
        cells = [
            f"{kernel.of_all_lanes(dims, outputs) / (dims * outputs):.2f}"
            for dims, outputs in SHAPES
        ]
        lines.append(f"| {kernel.product}, {kernel.outputs} outputs | {' | '.join(cells)} |")
    return "\n".join(lines)
