"""Products of experts with prompts: instructions, and how rows are padded, by how tokens choose experts.

The sizes are Maple's: 256 experts of width 512, of which 8 are chosen, and 2048 dims. Rows of an
expert are computed two at a time, and a last one alone, so that none is padded.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil

import mlx.core as mx
import numpy as np

from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.backend.metal_gathered import OUTPUTS, multiply
from tests.emulator import apple_gpu
from tests.emulator.apple_gpu import Code

EXPERTS, CHOSEN, DIMS, WIDTH = 256, 8, 2048, 512
GROUP_SIZE = 128
TOKENS = (64, 512)
MLX_ROWS = 16
"""Rows of a tile of MLX's product of sorted rows."""


def even(tokens: int) -> list[int]:
    """The same number of rows of each expert."""
    return [tokens * CHOSEN // EXPERTS] * EXPERTS


def skewed(tokens: int) -> list[int]:
    """Rows of each expert where the n-th is n times rarer than the first."""
    random = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, EXPERTS + 1)
    choices = [
        random.choice(EXPERTS, CHOSEN, replace=False, p=weights / weights.sum())
        for _ in range(tokens)
    ]
    return np.bincount(np.concatenate(choices), minlength=EXPERTS).tolist()


@cache
def _codes(inputs: int, are_codes: bool) -> tuple[Code, Code]:
    """The kernel for matrices with so many inputs, and the same without the last, single row."""
    x, starts = mx.zeros((2, inputs), mx.float16), mx.zeros((3,), mx.int32)
    weight = mx.zeros((2, OUTPUTS, inputs // 16), mx.uint32)
    scales = mx.zeros((2, OUTPUTS, inputs // GROUP_SIZE), mx.float16) if are_codes else None
    with launch.recording() as texts:
        multiply(x, weight, starts, starts, scales, scales)
    ((name, text),) = texts.items()
    single = "if (row < rows) {"
    assert text.count(single) == 1
    both, pairs = (
        apple_gpu.machine_code(name, each, (64, 1, 1))
        for each in (text, text.replace(single, "if (false) {"))
    )
    return both, pairs


def instructions(inputs: int, rows: int, are_codes: bool) -> float:
    """Slots of a SIMD group for 8 outputs of an expert."""
    both, pairs = _codes(inputs, are_codes)
    keep, pair, products, last = (loop.instructions for loop in both.loops)
    rounds = ceil(inputs / 16 / 32)
    total = pairs.outside.instructions + keep * rounds + rows // 2 * (pair + products * rounds)
    if rows % 2:
        total += last * rounds + both.outside.instructions - pairs.outside.instructions
    return total


def of_a_weight(counts: Sequence[int], are_codes: bool) -> float:
    """Instructions of a layer's three products for each weight and row."""
    matrices = (DIMS, WIDTH), (DIMS, WIDTH), (WIDTH, DIMS)
    total = sum(
        instructions(inputs, rows, are_codes) * ceil(outputs / OUTPUTS)
        for inputs, outputs in matrices
        for rows in counts
        if rows
    )
    return total / (sum(counts) * 3 * DIMS * WIDTH / 32)


def report() -> str:
    """Both kinds of codes, for tokens that choose experts evenly or not."""
    lines = [
        "| tokens, rows of experts | experts met | most rows | trits | codes of 2 bits "
        "| tiles of 16 rows: padding |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tokens in TOKENS:
        for name, counts in (("even", even(tokens)), ("skewed", skewed(tokens))):
            met = [rows for rows in counts if rows]
            padded = sum(ceil(rows / MLX_ROWS) * MLX_ROWS for rows in met) / sum(met)
            found = (of_a_weight(counts, are_codes) for are_codes in (False, True))
            cells = [f"{tokens}, {name}", f"{len(met)}", f"{max(met)}"]
            cells += [f"{number:.2f}" for number in found]
            lines.append(f"| {' | '.join(cells)} | {padded:.2f} |")
    return "\n".join(lines)
