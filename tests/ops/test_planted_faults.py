"""The tests of the Metal kernels of products see faults planted into them one by one."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend import choice
from mlx_mmfree.ops.backend.metal_functions import without_halves
from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import (
    check_bad_row,
    check_code_sums,
    check_codes,
    check_extreme_input,
    check_float_sums,
    check_fused_codes,
    check_fused_sums,
    check_fused_ties,
    check_ties,
)
from tests.ops.planting import BARRIER, SIMD_BARRIER, Fault, assert_seen


def decode() -> None:
    check_code_sums(11, 1050, 33, mx.float32)


def halves() -> None:
    check_code_sums(2, 1050, 33, mx.float32)


def halves_of_extremes() -> None:
    # every output is NaN, if it is not made of trits
    check_extreme_input(1, 2.0**126)


def prefill() -> None:
    with choice.use("tiles"):
        check_code_sums(70, 1070, 70, mx.float16)


def split() -> None:
    # the last step is the third part's, and ends within its tile
    with choice.use("split"):
        check_code_sums(70, 300, 70, mx.float16)


def split_floats() -> None:
    with choice.use("split"):
        check_float_sums(33, 100, 33, mx.float32)


def split_tiles() -> None:
    with choice.use("split"):
        check_fused_sums(70, 300, (33, 70), mx.float32)


def codes() -> None:
    mx.random.seed(0)
    x = mx.random.normal((3, 300)).at[:, 100].multiply(5)
    check_codes(x, 1 + 0.1 * mx.random.normal((300,)), 1e-1, "half_away")
    check_ties("half_away")


def fused_sums() -> None:
    check_fused_sums(2, 2100, (33, 5), mx.float32)


def fused_flushing() -> None:
    with without_halves():
        check_fused_sums(2, 2100, (33, 5), mx.float32)


def fused_wide() -> None:
    check_fused_sums(1, 63, (4161,), mx.float32)


def fused_groups() -> None:
    check_fused_sums(11, 100, (33, 5), mx.float32)


def fused_codes() -> None:
    check_fused_codes(2, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=5e-2)


def fused_ties() -> None:
    check_fused_ties("half_away")


def tiles() -> None:
    # the second matrix ends within its second tile
    check_fused_sums(70, 100, (33, 70), mx.float32)


def sets_in_tiles() -> None:
    check_fused_codes(49, 100, mx.float32, eps=5e-2)


def many_codes() -> None:
    check_fused_codes(49, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=5e-2)
    check_fused_ties("half_away", rows=49)


def many_bad_rows() -> None:
    check_bad_row(True, None, None, rows=49)


KERNELS = {
    decode: "ternary_matmul_decode",
    halves: "ternary_matmul_decode",
    halves_of_extremes: "ternary_matmul_decode",
    prefill: "ternary_matmul_prefill",
    split: "ternary_matmul_prefill",
    split_floats: "ternary_matmul_prefill",
    split_tiles: "bit_linear_tiles_2",
    codes: "rms_norm_quantize",
    fused_sums: "bit_linear_2",
    fused_flushing: "bit_linear_2",
    fused_wide: "bit_linear_1",
    fused_groups: "bit_linear_2",
    fused_codes: "bit_linear_2",
    fused_ties: "bit_linear_1",
    tiles: "bit_linear_tiles_2",
    sets_in_tiles: "bit_linear_tiles_2",
    many_codes: "bit_linear_codes",
    many_bad_rows: "bit_linear_codes",
}

FAULTS: dict[str, Fault] = {
    "decode with halves: inputs not taken off": Fault(halves, "[n] -= totals[row]", "[n]", 0),
    "decode with halves: unit of another index": Fault(halves, "f * unit_of_code(k)", "f", 0),
    "decode with halves: infinite inputs": Fault(
        halves_of_extremes, "< INFINITY", "<= INFINITY", 0
    ),
    "decode with halves: words of the first": Fault(halves_of_extremes, "n] + k / 16]", "n]]", 0),
    "decode with halves: inputs of other lanes": Fault(
        halves_of_extremes, "k = 16 * lane", "k = 0", 0
    ),
    "decode: stride of words": Fault(decode, "word += 32", "word += 33", 0),
    "decode: a word too many": Fault(decode, "16 * word < dims", "16 * word <= dims + 16", 0),
    "decode: last inputs left out": Fault(
        decode, "start + place < dims", "start + place + 1 < dims", 0
    ),
    "decode: inputs beyond the last": Fault(decode, "start + place < dims", "true", 0),
    "decode: wrong mask": Fault(decode, "3u << (2 * place)", "3u << (2 * place + 1)", 0),
    "decode: half of a code": Fault(decode, "3u << (2 * place)", "1u << (2 * place)", 0),
    "decode: upper indices": Fault(decode, "words >> 16", "words >> 14", 0),
    "decode: exponent": Fault(decode, "0x4B000000", "0x4A800000", 0),
    "decode: trits not centred": Fault(decode, "unit - 1.0f", "unit", 0),
    "decode: unit of an index": Fault(
        decode, "float>(1u << (2 * place))", "float>(1u << place)", 0
    ),
    "decode: outputs beyond the last": Fault(decode, "first + n < outputs)", "true)", 0),
    "decode: words beyond the last": Fault(decode, "min(n, outputs - 1 - first)", "n", 0),
    "decode: rows beyond the last": Fault(decode, "first_row + row < rows", "true", 0),
    "decode: inputs beyond the last row": Fault(decode, "min(row, rows - 1 - first_row)", "row", 0),
    "decode: inputs of the first rows": Fault(
        decode,
        "x + static_cast<size_t>(first_row)",
        "x + static_cast<size_t>(0)",
        0,
    ),
    "decode: stored to the next row": Fault(decode, "first + n] = sum", "first + n + 1] = sum", 0),
    "decode: lanes not summed": Fault(decode, "simd_sum(sums", "(sums", 0),
    "prefill: barrier before tiles are reused": Fault(prefill, BARRIER, "", 0),
    "prefill: barrier before products": Fault(prefill, BARRIER, "", 1),
    "prefill: barrier before strip is read": Fault(prefill, SIMD_BARRIER, "", 2),
    "prefill: barrier before strip is reused": Fault(prefill, SIMD_BARRIER, "", 3),
    "prefill: indices": Fault(prefill, "place % 8 + n", "place % 8", 0),
    "prefill: upper indices": Fault(prefill, "place - place % 8", "0", 0),
    "prefill: trits not centred": Fault(prefill, "unit - 1.0f", "unit", 0),
    "prefill: weights not transposed": Fault(prefill, "0, true)", "0, false)", 0),
    "prefill: depth": Fault(prefill, "at < DEPTH; at += 8", "at < DEPTH - 8; at += 8", 0),
    "prefill: last step": Fault(prefill, "k < dims + STEP;", "k < dims;", 0),
    "prefill: first step": Fault(prefill, "if (k > first)", "if (true)", 0),
    "prefill: word": Fault(prefill, "word_at += STEP / 16", "word_at += STEP / 32", 0),
    "prefill: inputs beyond the last": Fault(prefill, "four + n < dims", "four + n <= dims", 0),
    "prefill: rows beyond the last": Fault(
        prefill, "row < rows && output", "row <= rows && output", 0
    ),
    "prefill: inputs beyond the last row": Fault(
        prefill, "/ 4 * i, rows - 1)", "/ 4 * i, rows)", 0
    ),
    "prefill: words beyond the last": Fault(prefill, "outputs - 1))", "outputs))", 0),
    "prefill: tile of another group": Fault(prefill, "x_tile + tile_row * LINE", "x_tile", 0),
    "split: barrier before tiles are reused": Fault(split, SIMD_BARRIER, "", 0),
    "split: barrier before products": Fault(split, SIMD_BARRIER, "", 1),
    "split: barrier before strips are read": Fault(split, BARRIER, "", 2),
    "split: barrier before strips are reused": Fault(split, BARRIER, "", 3),
    "split: last part left out": Fault(split, "other < PARTS;", "other < PARTS - 1;", 0),
    "split: first part left out": Fault(split, "sum = strips[r * 32 + lane]", "sum = 0.0f", 0),
    "split: first part twice": Fault(split, "other * PART +", "other / 2 * PART +", 0),
    "split: all begin at the first input": Fault(split, "first = part * DEPTH", "first = 0", 0),
    "split: inputs of the first part": Fault(split, "* dims + first +", "* dims +", 0),
    "split: words of the first part": Fault(split, "+ first / 16", "", 0),
    "split: inputs of the next part": Fault(split, "x_at[i] += STEP", "x_at[i] += DEPTH", 0),
    "split: word of the next part": Fault(split, "word_at += STEP", "word_at += DEPTH", 0),
    "split: last round": Fault(split, "k < dims + STEP;", "k < dims + DEPTH;", 0),
    "split: inputs beyond the last": Fault(split, "four + n < dims", "four + n <= dims", 0),
    "split: inputs of another tile": Fault(split, "x_tiles + part * TILE * LINE", "x_tiles", 0),
    "split: trits of another tile": Fault(
        split, "trits_tiles + part * TILE * LINE", "trits_tiles", 0
    ),
    "split: rows of the first part": Fault(split, "r = n + part", "r = n", 0),
    "split floats: rows of a part": Fault(split_floats, "n += PARTS", "n += 2 * PARTS", 0),
    "split floats: a part left out": Fault(split_floats, "other < PARTS;", "other < PARTS - 1;", 0),
    "split: tiles of 64": Fault(split, "SPLIT ? 32 : 64", "64", 0),
    "split tiles: codes of the first part": Fault(split_tiles, "+ first / 4 + four", "+ four", 0),
    "split tiles: codes of the next part": Fault(
        split_tiles, "x_at[i] += STEP / 4", "x_at[i] += DEPTH / 4", 0
    ),
    "split tiles: last part left out": Fault(
        split_tiles, "other < PARTS;", "other < PARTS - 1;", 0
    ),
    "split tiles: barrier before strips are read": Fault(split_tiles, BARRIER, "", 2),
    "split tiles: barrier before products": Fault(split_tiles, SIMD_BARRIER, "", 1),
    "split tiles: wrong matrix": Fault(split_tiles, "block >= (outputs", "block > (outputs", 0),
    "codes: wrong scale": Fault(codes, "127.0f /", "128.0f /", 0),
    "codes: barrier": Fault(codes, BARRIER, "", 0),
    "codes: epsilon left out": Fault(codes, "dims) + eps", "dims)", 0),
    "codes: ties": Fault(codes, "half_away ? round", "half_away ? rint", 0),
    "codes: norm weight left out": Fault(codes, "if (WEIGHTED)", "if (false)", 0),
    "codes: largest of one SIMD group": Fault(
        codes,
        "lane < groups ? group_largest[lane]",
        "lane < 1 ? group_largest[group]",
        0,
    ),
    "fused: stride of words": Fault(fused_sums, "word += 32", "word += 33", 0),
    "fused: wrong mask": Fault(fused_sums, "0x00030003u", "0x00010003u", 0),
    "fused: trits of another index": Fault(fused_sums, "4 * four + k)", "4 * four)", 0),
    "fused: upper indices": Fault(fused_sums, "word >> 10", "word >> 8", 0),
    "fused: unit of another index": Fault(fused_sums, "index % 2 == 0 ?", "true ?", 0),
    "fused: inputs of another quarter": Fault(fused_sums, "+ four + 2)", "+ four + 1)", 0),
    "fused: inputs of another index": Fault(fused_sums, "low[k]", "low[k / 2]", 0),
    "fused: sum of inputs left out": Fault(fused_sums, "-totals[r]", "0.0f", 0),
    "fused: sum of one SIMD group's inputs": Fault(
        fused_sums, "lane < SIMD_GROUPS ? total", "lane == 0 ? total", 0
    ),
    "fused: barrier of sums of inputs": Fault(fused_sums, BARRIER, "", 3),
    "fused without halves: wrong mask": Fault(
        fused_flushing, "3u << (2 * place)", "3u << (2 * place + 1)", 0
    ),
    "fused without halves: upper indices": Fault(
        fused_flushing, "under_exponent(word, 8)", "under_exponent(word, 0)", 0
    ),
    "fused wide: result of another output": Fault(
        fused_wide, "OUTPUTS * r + n", "4 * r + n % 4", 0
    ),
    "fused: words beyond the last": Fault(fused_sums, "min(own, outputs - OUTPUTS)", "own", 0),
    "fused: rows beyond the last": Fault(fused_groups, "row < rows &&", "row <= rows &&", 0),
    "fused: inputs beyond the last row": Fault(
        fused_groups,
        "min(first_row + row, rows - 1)",
        "first_row + row",
        0,
    ),
    "fused: rows of the first group": Fault(
        fused_groups, "min(first_row + row, rows - 1)", "row", 0
    ),
    "fused: words of the first slab": Fault(fused_sums, "+ first_word + word]", "+ word]", 0),
    "fused: a word too few": Fault(
        fused_sums, "used_words - first_word", "used_words - first_word - 1", 0
    ),
    "fused: an input too many": Fault(fused_sums, "start + k < dims", "start + k <= dims", 1),
    "fused: inputs of the first slab": Fault(fused_sums, "16 * first_word + at", "at", 0),
    "fused: barrier before products": Fault(fused_sums, BARRIER, "", 1),
    "fused: barrier after products": Fault(fused_sums, BARRIER, "", 2),
    "fused: lanes not summed": Fault(fused_sums, "sum = simd_sum(sum);", "", 0),
    "fused: wrong matrix": Fault(fused_sums, ".x >= static_cast", ".x > static_cast", 0),
    "fused: outputs of matrices before": Fault(
        fused_sums, "before = weight0", "before = 32 + 0 * weight0", 0
    ),
    "fused: scale of another output": Fault(
        fused_sums, "[0] == 1 ? 0 : output", "[0] == 1 ? 0 : 0", 1
    ),
    "fused: scale of another matrix": Fault(fused_sums, "scale0[", "scale1[", 0),
    "fused: residual of another row": Fault(fused_sums, "residual[at]", "residual[output]", 0),
    "fused: residual left out": Fault(fused_sums, "if (RESIDUAL)", "if (false)", 0),
    "fused: barrier of statistics": Fault(fused_codes, BARRIER, "", 0),
    "fused: wrong scale": Fault(fused_codes, "scale = code_scales[r]", "scale = code_scales[0]", 0),
    "fused: scale of codes": Fault(fused_codes, "127.0f /", "128.0f /", 0),
    "fused: largest without own norm": Fault(
        fused_codes,
        "weighted = normed * weight_of_own",
        "weighted = normed",
        0,
    ),
    "fused: first norm": Fault(
        fused_codes, "factors[row] = precise", "const float unused = precise", 0
    ),
    "fused: norm weight": Fault(fused_codes, "NORM && inside ?", "false ?", 0),
    "fused: own norm of another matrix": Fault(
        fused_codes, "own_norm = own_norm1;", "own_norm = own_norm0;", 0
    ),
    "fused: codes without their scale": Fault(
        fused_codes, "factors[row] *= code_scales[row];", "", 0
    ),
    "fused: squares of another norm": Fault(
        fused_codes,
        "found[0] = squares[row]",
        "found[0] = normed_squares[row]",
        0,
    ),
    "fused: epsilon of another norm": Fault(fused_codes, "epsilons[1]", "epsilons[0]", 0),
    "fused: gate": Fault(fused_codes, "value * sigmoid(value) * up", "sigmoid(value) * up", 0),
    "fused: gated by a neighbour": Fault(fused_codes, "+ dims))[k]", "+ dims - 1))[k]", 0),
    "fused: half of a row": Fault(fused_codes, "rows - 1) * width", "rows - 1) * dims", 0),
    "fused: ties": Fault(fused_ties, "half_away ? round", "half_away ? rint", 0),
    "tiles: barrier before tiles are reused": Fault(tiles, BARRIER, "", 0),
    "tiles: barrier before products": Fault(tiles, BARRIER, "", 1),
    "tiles: codes of another index": Fault(tiles, "? first[n", "? second[n", 0),
    "tiles: codes not centred": Fault(tiles, "half(1152.0f)", "half(1151.0f)", 0),
    "tiles: codes of the tile before": Fault(
        tiles, "x_at[i] += STEP / 4", "x_at[i] += STEP / 8", 0
    ),
    "tiles: codes of another row": Fault(
        tiles,
        "(first_scale + row) * code_words",
        "first_scale * code_words",
        0,
    ),
    "tiles: scale of codes of another set": Fault(
        sets_in_tiles,
        "code_scales[first_scale + row]",
        "code_scales[row]",
        0,
    ),
    "tiles: codes of another set": Fault(sets_in_tiles, "(first_scale + row)", "(0 + row)", 0),
    "tiles: last inputs": Fault(tiles, "dims = 4 * code_words", "dims = 4 * code_words - 32", 0),
    "tiles: outputs beyond the last": Fault(
        tiles, "row < rows && output < outputs", "row < rows", 0
    ),
    "tiles: rows beyond the last": Fault(tiles, "row < rows && output", "row <= rows && output", 0),
    "tiles: wrong matrix": Fault(tiles, ".x >= static_cast", ".x > static_cast", 0),
    "tiles: blocks of the first matrix": Fault(tiles, "first_block = end1", "first_block = 0", 0),
    "tiles: outputs of matrices before": Fault(
        tiles, "before = weight0", "before = 32 + 0 * weight0", 0
    ),
    "tiles: scale of another matrix": Fault(tiles, "scale0[", "scale1[", 0),
    "tiles: scale of another output": Fault(tiles, "[0] == 1 ? 0 : output", "[0] == 1 ? 0 : 0", 1),
    "tiles: residual of another row": Fault(tiles, "residual[at]", "residual[output]", 0),
    "tiles: residual left out": Fault(tiles, "if (RESIDUAL)", "if (false)", 0),
    "many codes: barrier": Fault(many_codes, BARRIER, "", 0),
    "many codes: ties": Fault(many_codes, "half_away ? round", "half_away ? rint", 0),
    "many codes: gate": Fault(many_codes, "value * sigmoid(value) * up", "sigmoid(value) * up", 0),
    "many codes: gated by a neighbour": Fault(many_codes, "+ dims))[k]", "+ dims - 1))[k]", 1),
    "many codes: input of another row": Fault(
        many_codes, "static_cast<size_t>(row) * width", "0", 0
    ),
    "many codes: first norm": Fault(many_codes, "if (NORM) factor", "if (false) factor", 0),
    "many codes: norm weight": Fault(many_codes, "if (NORM && inside)", "if (false)", 0),
    "many codes: largest without norm": Fault(
        many_codes,
        "NORM ? value * static_cast<float>(norm[k]) : value",
        "value",
        0,
    ),
    "many codes: largest without own norm": Fault(many_codes, "? normed * ", "? normed + 0 * ", 0),
    "many codes: own norm of another matrix": Fault(many_codes, "own_norm0[k]", "own_norm1[k]", 1),
    "many codes: epsilon of another norm": Fault(many_codes, "epsilons[1]", "epsilons[0]", 0),
    "many codes: squares of another norm": Fault(
        many_codes,
        "squares / size + epsilons[0]",
        "normed_squares / size + epsilons[0]",
        0,
    ),
    "many codes: largest of another set": Fault(
        many_codes,
        "largest[chosen] * factor",
        "largest[0] * factor",
        0,
    ),
    "many codes: largest of one SIMD group": Fault(
        many_codes,
        "statistics[16 * (2 + chosen) + lane]",
        "statistics[16 * (2 + chosen)]",
        0,
    ),
    "many codes: scale of another row": Fault(
        many_codes, "chosen * rows + row]", "chosen * rows]", 0
    ),
    "many codes: set of another matrix": Fault(
        many_codes,
        "static_cast<size_t>(chosen) * rows",
        "static_cast<size_t>(0) * rows",
        0,
    ),
    "many codes: an input too many": Fault(
        many_codes, "inside = k < dims", "inside = k <= dims", 0
    ),
    "many codes: indices": Fault(many_codes, "16 * (n % 2) + 8 * (n / 2)", "8 * n", 0),
    "many codes: NaN": Fault(many_bad_rows, "isnan(weighted) ? INFINITY", "false ? INFINITY", 0),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    assert_seen(fault, KERNELS[fault.check], emulated, monkeypatch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("check", KERNELS)
def test_without_faults_all_is_well(check: Callable[[], None], emulated: Emulator) -> None:
    check()
    assert emulated.records
