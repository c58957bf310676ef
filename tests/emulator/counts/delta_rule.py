"""The instructions of `gated_delta_rule` by the number of positions: in one launch, and in chunks.

Counted are slots of the busiest core, for 48 heads of 128 dims with a gate for each, as Qwen3.5 has
them. A threadgroup stays on one core. MLX's products of matrices have no machine code here. Of them,
multiply-adds alone are counted, 32 an instruction, as if they were spread evenly over all cores. What
only moves or scales arrays is left out. So chunks take more than is shown.
"""

from functools import cache
from math import ceil
from time import process_time

import mlx.core as mx
import pytest

from mlx_mmfree.ops import gated_delta_rule, use_backend
from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.gated_delta_rule.metal import MAX_LENGTH
from mlx_mmfree.ops.gated_linear_attention.definition import CHUNK_LENGTH
from tests import graph
from tests.emulator import apple_gpu
from tests.emulator.apple_gpu import Code
from tests.ops.conftest import build_stand_ins
from tests.ops.test_layer_launches import fuse_gates, layer_models, read_prompt

HEADS, DIMS, CORES = 48, 128, (10, 40)
LENGTHS = (8, 16, 24, 32, 33, 40, 48, 56, 64, 65, 96, 128, 256, 512)
_SIMD_GROUPS = 8


@cache
def _codes(length: int) -> dict[str, Code]:
    """The machine code of the kernels for so many positions."""
    row, state = mx.zeros((1, 1, length, DIMS)), mx.zeros((1, 1, DIMS, DIMS))
    with use_backend("metal"), launch.recording() as texts:
        gated_delta_rule(row, row, row, None, row[..., :1], state)
    found = {}
    for name, text in texts.items():
        kind = name.removeprefix("custom_kernel_gated_delta_rule_").partition("__")[0]
        # a kernel that is checked first has fewer keys
        found[kind] = apple_gpu.machine_code(name, text, (32 * _SIMD_GROUPS, 1, 1))
    return found


def _on_the_busiest(threadgroups: int, cores: int, instructions: float) -> float:
    return ceil(threadgroups / cores) * instructions


def in_one_launch(length: int, cores: int) -> float:
    """Instructions of the busiest core where the state stays in registers."""
    code = _codes(1)["head"]
    rounds = code.outside.instructions + length * sum(loop.instructions for loop in code.loops)
    return _on_the_busiest(HEADS, cores, _SIMD_GROUPS * rounds)


def in_chunks(length: int, cores: int) -> float:
    """Slots of the launches between MLX's products, and the products' multiply-adds."""
    chunks = ceil(length / CHUNK_LENGTH)
    size = ceil(length / chunks)
    codes = _codes(CHUNK_LENGTH)
    total = _on_the_busiest(HEADS * chunks, cores, _between(codes["between"], size))
    total += _on_the_busiest(HEADS * 2, cores, _lead(codes["lead_head"], size, chunks))
    return total + HEADS * chunks * multiply_adds(size) / 32 / cores


def multiply_adds(size: int) -> int:
    """Slots of MLX's products for a chunk of a head."""
    return 5 * size * size * DIMS + size * DIMS * DIMS


def _between(code: Code, size: int) -> float:
    """Of a threadgroup, all SIMD groups together."""
    earlier, later, above, down, spans, *products, writes = (a.instructions for a in code.loops)
    first, first_inner, second, second_inner = products
    # two SIMD groups have a position each; others begin with the products of the gates above
    total: float = (
        code.outside.instructions * _SIMD_GROUPS + (earlier + later) * 96 + above * 2 * 96
    )
    total += down * 2 * size
    for bits in range(2, (size - 1).bit_length()):
        span = 1 << bits
        total += spans * 2 * _SIMD_GROUPS
        # as many SIMD groups as there are 32 numbers below the diagonal
        total += span * (first + first_inner * span / 4)
        total += span * (second + second_inner * (span / 4 + 1) / 2)
    return total + writes * 2 * size


def _lead(code: Code, size: int, chunks: int) -> float:
    """Of a threadgroup, all SIMD groups together."""
    chunk, steps, reads, sums, writes = (loop.instructions for loop in code.loops)
    rounds = ceil(size * _SIMD_GROUPS / 32)
    each = chunk + (steps + sums) * rounds + (reads + writes) * size
    return _SIMD_GROUPS * (code.outside.instructions + chunks * each)


def lengths() -> str:
    """Both curves as Markdown, in thousands of instructions."""
    head = " | ".join(f"{way}, {n} cores" for n in CORES for way in ("one launch", "chunks"))
    lines = [f"| positions | {head} |", f"| ---: |{' ---: |' * 2 * len(CORES)}"]
    for length in LENGTHS:
        found = [way(length, n) / 1e3 for n in CORES for way in (in_one_launch, in_chunks)]
        lines.append(f"| {length} | {' | '.join(f'{number:,.0f}' for number in found)} |")
    lines += ["", f"Up to {MAX_LENGTH} positions are computed in one launch."]
    return "\n".join(lines)


TURNS = (1, 16, 40, 128, 512, 2048)
_REPEATS = 15


def turns() -> str:
    """Dispatches of a gated delta layer of Qwen3.5, and the processor time of building its graph."""
    lines = ["| positions | dispatches | host, ms |", "| ---: | ---: | ---: |"]
    with pytest.MonkeyPatch.context() as patch:
        build_stand_ins(patch)
        fuse_gates(patch)
        models = layer_models("linear layer of qwen3.5")
        for length in TURNS:
            counts, times = [], []
            for model in models:
                counts.append(graph.launches(read_prompt(model, 1, length)).total())
                seconds = []
                for _ in range(_REPEATS):
                    begin = process_time()
                    read_prompt(model, 1, length)
                    seconds.append(process_time() - begin)
                times.append(min(seconds))
            dispatches, seconds_more = (last - first for first, last in (counts, times))
            lines.append(f"| {length:,} | {dispatches} | {1e3 * seconds_more:.2f} |")
    return "\n".join(lines)


def report() -> str:
    """Both tables."""
    return f"Thousands of instructions:\n\n{lengths()}\n\nA layer of Qwen3.5:\n\n{turns()}"
