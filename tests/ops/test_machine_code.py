"""Machine code of the Metal kernels by clang: every text compiles, and the loops over weights are lean.

The code is made for arm64, as there is no compiler for Apple's GPUs on other systems. Its
instructions count the work that a text asks for, and say nothing about time.
"""

import re
from collections.abc import Iterable

import pytest

from mlx_mmfree.ops.inspection import fallback_texts, kernel_texts
from tests.emulator import compiler

if reason := compiler.unavailable():
    pytest.skip(reason, allow_module_level=True)

# for each weight, by number of rows: its trit, products with each row's input, loads and addresses;
# a little more than was counted, as compilers differ
MOST_INSTRUCTIONS = {
    "bit_linear_1__float16_t_{}_4_9_256_1_1_0_0_0_1_0_0_": {1: 2.8},
    "bit_linear_1__float16_t_{}_4_4_64_1_1_0_0_0_1_0_0_": {3: 7.1, 4: 9.1},
    "ternary_matmul_decode__{}_1_1_float_": {1: 3.3, 2: 5.3},
    "ternary_matmul_decode__{}_1_0_float_": {4: 10.4},
}
# outputs of a SIMD group, where there are not 4
OUTPUTS = {"bit_linear_1__float16_t_{}_4_9_256_1_1_0_0_0_1_0_0_": 9}
INPUTS_OF_A_STEP = 16
# the last words of a row may hold fewer inputs
RAGGED = "ternary_matmul_decode__3_0_0_float_"
# by number of parts, and the most instructions beside products, loads of matrices and barriers: what
# loads, decodes and lays out 16 inputs and 16 weights
TILES = {
    "ternary_matmul_prefill__float16_t_1_{}_float_": ((1, 8), 220),
    "ternary_matmul_prefill__float_1_{}_float_": ((1, 4), 220),
    "bit_linear_tiles_1__float16_t_float16_t_{}_0_0_": ((1, 8), 265),
    "bit_linear_tiles_3__float16_t_float16_t_{}_1_0_": ((1, 8), 265),
}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return kernel_texts()


@pytest.fixture(scope="module")
def loops(texts: dict[str, str]) -> dict[str, compiler.Loop]:
    """The loops over weights of some kernels, by a part of the name."""
    parts = [part.format(rows) for part, counts in MOST_INSTRUCTIONS.items() for rows in counts]
    tiles = [part.format(parts) for part, (split, _) in TILES.items() for parts in split]
    return hot_loops(texts, (*parts, RAGGED, *tiles))


def hot_loops(texts: dict[str, str], parts: Iterable[str]) -> dict[str, compiler.Loop]:
    chosen = {part: next(text for name, text in texts.items() if part in name) for part in parts}
    codes = compiler.machine_codes(chosen.values())
    return {part: compiler.hot_loop(code) for part, code in zip(chosen, codes, strict=True)}


@pytest.mark.exhaustive
def test_every_text_compiles(texts: dict[str, str]) -> None:
    kernels = {name.split("__")[0].removeprefix("custom_kernel_") for name in texts}
    for kernel in (
        *("bit_linear_1", "bit_linear_4", "bit_linear_codes", "bit_linear_tiles_4"),
        *("mlgru_scan", "mlgru_step", "ternary_matmul_prefill"),
    ):
        assert kernel in kernels
    fallbacks = fallback_texts()
    assert any("bit_linear_4" in name for name in fallbacks)
    compiler.check([*texts.values(), *fallbacks.values()])


@pytest.mark.exhaustive
def test_no_loop_shifts_by_variables_divides_or_calls(loops: dict[str, compiler.Loop]) -> None:
    assert {part: loop.slow for part, loop in loops.items() if loop.slow} == {}


@pytest.mark.slow
def test_no_loop_of_any_text_does(texts: dict[str, str]) -> None:
    products = [name for name in texts if re.search(r"bit_linear_(tiles_)?\d|ternary_matmul", name)]
    loops = hot_loops(texts, products)
    assert {name: loop.slow for name, loop in loops.items() if loop.slow} == {}


@pytest.mark.parametrize("kernel", MOST_INSTRUCTIONS)
def test_instructions_of_a_weight(loops: dict[str, compiler.Loop], kernel: str) -> None:
    for rows, most in MOST_INSTRUCTIONS[kernel].items():
        count = loops[kernel.format(rows)].count / (OUTPUTS.get(kernel, 4) * INPUTS_OF_A_STEP)
        # the products and a mask for two trits: with fewer instructions it would not be this loop
        assert rows + 0.5 < count <= most, (rows, count)


@pytest.mark.parametrize("kernel", TILES)
def test_instructions_of_a_tile(loops: dict[str, compiler.Loop], kernel: str) -> None:
    split, most = TILES[kernel]
    for parts in split:
        loop = loops[kernel.format(parts)]
        names = [each.split()[0] for each in loop.instructions]
        # 32 inputs of a tile: 4 x 4 matrices of sums, 4 products for each; half as many of one part
        products, barriers = (64, "threadgroup") if parts == 1 else (32, "simdgroup")
        assert names.count("simdgroup_multiply") == products
        assert names.count("simdgroup_load") == products / 2
        assert [name for name in names if "barrier" in name] == [f"{barriers}_barrier"] * 2
        others = loop.count - products - products // 2 - 2
        assert 0 < others <= most, (parts, others)
