"""Slots of the kernels of products for one row, as the bounds of `mmfree bench --bound` have it."""

import json
from collections.abc import Iterator
from itertools import product

from mlx_mmfree.evaluation.kernel_slots import Around, Counts, KernelSlots
from mlx_mmfree.evaluation.kernel_slots import counts as kept
from mlx_mmfree.ops.activations import Activation
from mlx_mmfree.ops.backend.metal_gathered import OUTPUTS
from mlx_mmfree.ops.bit_linear import around_product
from mlx_mmfree.ops.bit_linear.metal_groups import GATES
from mlx_mmfree.ops.bit_linear.metal_tuning import MOST_OUTPUTS, SIMD_GROUPS
from mlx_mmfree.ops.inspection import kernel_texts
from tests.emulator import apple_gpu
from tests.emulator.apple_gpu import Code
from tests.emulator.counts import bit_linear, codes

SHAPES = ((1024, 1024), (2560, 2560), (4096, 4096), (5120, 17408), (17408, 5120))
"""Inputs and outputs for which `report` shows the counts."""

_OUTPUTS_AROUND = 8
"""Outputs of a SIMD group for which gates and norms are counted."""


def counted() -> Counts:
    """Counts the kernels anew."""
    around = (
        around_of(gate, has_norm, has_own_norm)
        for gate, has_norm, has_own_norm in product(GATES, (False, True), (False, True))
    )
    return Counts([*_kernels()], {each.what: each for each in around})


def _kernels() -> Iterator[KernelSlots]:
    for outputs in range(1, MOST_OUTPUTS[1] + 1):
        yield of_bit_linear(outputs)
    texts = kernel_texts()
    for name, part, outputs, loops in (
        # a second loop is of the last inputs of a row
        ("TernaryMatmul", "ternary_matmul_decode__1_1_1_float16_t_", 4, 1),
        # not sorted: the matrix of each row is kept in one loop, and multiplied in another
        ("GatherTernaryMatmul", "gather_ternary_matmul__2_2_0_1_1_1_0_1_float16_t_", OUTPUTS, 2),
        ("GatherAffineMatmul", "gather_affine_matmul__8_2_0_1_1_1_1_64_float16_t_", OUTPUTS, 2),
    ):
        kernel, text = next(each for each in texts.items() if part in each[0])
        code = apple_gpu.machine_code(kernel, text, (64, 1, 1))
        slots = sum(loop.slots for loop in code.loops[:loops])
        yield KernelSlots(name, outputs, [2], code.outside.slots, {512: slots})
    for bits in codes.metal.BITS:
        for outputs in (4, 8):
            yield _of_codes(bits, outputs, codes.own(bits, 1, outputs))
    # these are left to MLX
    for bits in (4, 8):
        yield _of_codes(bits, 4, codes.of_mlx(bits))


def of_bit_linear(outputs: int) -> KernelSlots:
    """Of one row that is quantised, without gate and norms."""
    code = bit_linear.of(1, outputs).code
    *_, slab, _, products = code.loops
    rounds = {16 * bit_linear.of(1, outputs).slab: slab.slots, 512: products.slots}
    return KernelSlots("BitLinear", outputs, [*SIMD_GROUPS], code.outside.slots, rounds)


def around_of(gate: Activation | None, has_norm: bool, has_own_norm: bool) -> Around:
    """Of a gate and norms, and of codes, which there always are."""
    eps = 1e-6 if has_own_norm else None
    plain, code = (
        bit_linear.of(1, _OUTPUTS_AROUND, options).code
        for options in (
            bit_linear.options(),
            bit_linear.options(gate=gate, has_norm=has_norm, eps=eps),
        )
    )
    *statistics, _, filling, _ = code.loops
    return Around(
        around_product(gate, has_norm, has_own_norm),
        code.outside.slots - plain.outside.slots,
        sum(loop.slots for loop in (*statistics, filling)) / bit_linear.INPUTS_OF_A_GROUP,
    )


def _of_codes(bits: int, outputs: int, count: codes.Count) -> KernelSlots:
    code: Code = count.code
    name = f"codes of {bits} bit{'s' * (bits > 1)}"
    # MLX's has code that only some widths run
    outside = code.outside.slots if count.is_own else 0
    return KernelSlots(name, outputs, [2], outside, {32 * count.inputs: code.hot.slots})


def as_json(counts: Counts) -> str:
    """The counts as the package holds them."""
    held = {
        "kernels": [kernel._asdict() for kernel in counts.kernels],
        "around": [each._asdict() for each in counts.around.values()],
    }
    return json.dumps(held, indent=1) + "\n"


def report() -> str:
    """Slots for each weight at some shapes, from the counts that the package holds."""
    shapes = " | ".join(f"{dims} x {outputs}" for dims, outputs in SHAPES)
    lines = [f"| kernel | {shapes} |", f"| --- |{' ---: |' * len(SHAPES)}"]
    kernels, around = kept()
    for kernel in kernels:
        is_fused = kernel.product == "BitLinear"
        for what, each in around.items() if is_fused else [("", None)]:
            if is_fused and kernel.outputs not in (4, _OUTPUTS_AROUND):
                continue
            cells = [
                f"{kernel.of_all_lanes(dims, outputs, each) / (dims * outputs):.2f}"
                for dims, outputs in SHAPES
            ]
            name = f"{kernel.product}{f' ({what})' * bool(what)}, {kernel.outputs} outputs"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
