"""The tests of the Metal kernels see faults planted into them one by one."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend import self_check
from tests.emulator.emulator import Emulator, KernelError
from tests.ops.kernel_checks import (
    check_bad_row,
    check_code_sums,
    check_codes,
    check_fused_codes,
    check_fused_sums,
    check_fused_ties,
    check_gated_norm,
    check_scan,
    check_scan_gradient,
    check_step,
    check_ties,
    scan_inputs,
)


def decode() -> None:
    check_code_sums(11, 1050, 33, mx.float32)


def prefill() -> None:
    # two parts, the second of which ends within a tile
    check_code_sums(70, 1070, 70, mx.float16)


def codes() -> None:
    mx.random.seed(0)
    x = mx.random.normal((3, 300)).at[:, 100].multiply(5)
    check_codes(x, 1 + 0.1 * mx.random.normal((300,)), 1e-1, "half_away")
    check_ties("half_away")


def scan() -> None:
    check_scan(*scan_inputs(2, 200, 37, mx.float32))


def scan_gradient() -> None:
    check_scan_gradient(*scan_inputs(2, 200, 37, mx.float32))


def fused_sums() -> None:
    check_fused_sums(2, 1100, (33, 5), mx.float32)


def fused_groups() -> None:
    check_fused_sums(11, 100, (33, 5), mx.float32)


def fused_codes() -> None:
    check_fused_codes(2, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=5e-2)


def fused_ties() -> None:
    check_fused_ties("half_away")


def tiles() -> None:
    # the second matrix ends within its second tile
    check_fused_sums(70, 100, (33, 70), mx.float32)


def many_codes() -> None:
    check_fused_codes(49, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=5e-2)
    check_fused_ties("half_away", rows=49)


def sets_in_tiles() -> None:
    check_fused_codes(49, 100, mx.float32, eps=5e-2)


def many_bad_rows() -> None:
    check_bad_row(True, None, None, rows=49)


def step() -> None:
    check_step(3, 100, mx.float32)


def positions() -> None:
    # two chunks
    check_step(2, 40, mx.float32, length=130, has_starts=True)


def positions_output() -> None:
    check_step(2, 40, mx.float32, length=3)


def gated_norm() -> None:
    check_gated_norm(*mx.random.normal((2, 3, 300), key=mx.random.key(0)), mx.ones((300,)))


KERNELS = {
    decode: "ternary_matmul_decode",
    prefill: "ternary_matmul_prefill",
    codes: "rms_norm_quantize",
    scan: "linear_scan_forward",
    scan_gradient: "linear_scan_backward",
    fused_sums: "bit_linear_2",
    fused_groups: "bit_linear_2",
    fused_codes: "bit_linear_2",
    fused_ties: "bit_linear_1",
    tiles: "bit_linear_tiles_2",
    sets_in_tiles: "bit_linear_tiles_2",
    many_codes: "bit_linear_codes",
    many_bad_rows: "bit_linear_codes",
    step: "mlgru_step",
    positions: "mlgru_scan",
    positions_output: "gated_rms_norm",
    gated_norm: "gated_rms_norm",
}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

# check, text of the kernel, what it is replaced by, which of its occurrences (from 0)
FAULTS: dict[str, tuple[Callable[[], None], str, str, int]] = {
    "decode: stride of words": (decode, "word += 32", "word += 33", 0),
    "decode: a word too many": (decode, "16 * word < dims", "16 * word <= dims + 16", 0),
    "decode: last inputs left out": (decode, "start + k >= dims", "start + k >= dims - 1", 0),
    "decode: inputs beyond the last": (decode, "min(k, dims - 1 - start)", "k", 0),
    "decode: wrong mask": (decode, "3u << (2 * place)", "3u << (2 * place + 1)", 0),
    "decode: half of a code": (decode, "3u << (2 * place)", "1u << (2 * place)", 0),
    "decode: upper places": (decode, "words >> 16", "words >> 14", 0),
    "decode: exponent": (decode, "0x4B000000", "0x4A800000", 0),
    "decode: trits not centred": (decode, "unit - 1.0f", "unit", 0),
    "decode: unit of a place": (decode, "float>(1u << (2 * place))", "float>(1u << place)", 0),
    "decode: outputs beyond the last": (decode, "first + n < outputs)", "true)", 0),
    "decode: words beyond the last": (decode, "min(n, outputs - 1 - first)", "n", 0),
    "decode: rows beyond the last": (decode, "first_row + row < rows", "true", 0),
    "decode: inputs beyond the last row": (decode, "min(row, rows - 1 - first_row)", "row", 0),
    "decode: inputs of the first rows": (
        decode,
        "x + static_cast<size_t>(first_row)",
        "x + static_cast<size_t>(0)",
        0,
    ),
    "decode: stored to the next row": (decode, "first + n] = sum", "first + n + 1] = sum", 0),
    "decode: lanes not summed": (decode, "simd_sum(sums[row][n])", "(sums[row][n])", 0),
    "prefill: barrier before tiles are reused": (prefill, BARRIER, "", 0),
    "prefill: barrier before products": (prefill, BARRIER, "", 1),
    "prefill: barrier before strip is read": (prefill, SIMD_BARRIER, "", 0),
    "prefill: barrier before strip is reused": (prefill, SIMD_BARRIER, "", 1),
    "prefill: places": (prefill, "place % 8 + n", "place % 8", 0),
    "prefill: upper places": (prefill, "place - place % 8", "0", 0),
    "prefill: trits not centred": (prefill, "unit - 1.0f", "unit", 0),
    "prefill: weights not transposed": (prefill, "0, true)", "0, false)", 0),
    "prefill: depth": (prefill, "at < DEPTH; at += 8", "at < DEPTH - 8; at += 8", 0),
    "prefill: last step": (prefill, "k < stop + DEPTH;", "k < stop;", 0),
    "prefill: first step": (prefill, "if (k > start)", "if (true)", 0),
    "prefill: word": (prefill, "word_at += DEPTH / 16", "word_at += DEPTH / 32", 0),
    "prefill: words of the first part": (prefill, "+ start / 16", "", 0),
    "prefill: inputs of the first part": (prefill, "* dims + start +", "* dims +", 0),
    "prefill: a part of another size": (prefill, "min(start + depth, dims)", "dims", 0),
    "prefill: stored to the first part": (prefill, "static_cast<size_t>(part) * rows", "0", 0),
    "prefill: inputs beyond the last": (prefill, "four + n < dims", "four + n <= dims", 0),
    "prefill: rows beyond the last": (prefill, "row < rows && output", "row <= rows && output", 0),
    "prefill: inputs beyond the last row": (prefill, "+ 16 * i, rows - 1)", "+ 16 * i, rows)", 0),
    "prefill: words beyond the last": (prefill, "outputs - 1))", "outputs))", 0),
    "prefill: tile of another group": (prefill, "x_tile + tile_row * LINE", "x_tile", 0),
    "codes: wrong scale": (codes, "127.0f /", "128.0f /", 0),
    "codes: barrier": (codes, BARRIER, "", 0),
    "codes: epsilon left out": (codes, "dims) + eps", "dims)", 0),
    "codes: ties": (codes, "half_away ? round", "half_away ? rint", 0),
    "codes: norm weight left out": (codes, "if (WEIGHTED)", "if (false)", 0),
    "codes: largest of one SIMD group": (
        codes,
        "lane < groups ? group_largest[lane]",
        "lane < 1 ? group_largest[group]",
        0,
    ),
    "scan: barrier": (scan, BARRIER, "", 0),
    "scan: chunks before": (scan, "c < chunk;", "c < chunk - 1;", 0),
    "scan: sum of a chunk": (scan, "sum = gate * sum +", "sum = sum +", 0),
    "scan: channels beyond the last": (scan, "channel < dims ? min(", "true ? min(", 0),
    "scan: last step": (scan, "stop; t++", "stop - 1; t++", 1),
    "scan gradient: barrier": (scan_gradient, BARRIER, "", 0),
    "scan gradient: state before": (scan_gradient, "states[at - dims]", "states[at]", 0),
    "scan gradient: first step": (scan_gradient, "t >= start", "t > start", 1),
    "scan gradient: chunks after": (scan_gradient, "c > chunk;", "c >= chunk;", 0),
    "fused: stride of words": (fused_sums, "word += 32", "word += 33", 0),
    "fused: wrong mask": (fused_sums, "3u << (2 * place)", "3u << (2 * place + 1)", 0),
    "fused: trits of another place": (fused_sums, "(k + n) % 8", "k % 8", 0),
    "fused: upper places": (fused_sums, "k - k % 8", "0", 0),
    "fused: inputs of another quarter": (fused_sums, "+ k / 4) * LINE", "+ k / 8) * LINE", 0),
    "fused: inputs of another place": (fused_sums, "+ at % 4]", "+ at % 2]", 0),
    "fused: words beyond the last": (fused_sums, "min(n, outputs - 1 - first)", "n", 0),
    "fused: rows beyond the last": (fused_groups, "row < rows &&", "row <= rows &&", 0),
    "fused: inputs beyond the last row": (
        fused_groups,
        "min(first_row + row, rows - 1)",
        "first_row + row",
        0,
    ),
    "fused: rows of the first group": (fused_groups, "min(first_row + row, rows - 1)", "row", 0),
    "fused: words of the first slab": (fused_sums, "+ start + word]", "+ word]", 0),
    "fused: a word too few": (fused_sums, "used_words - start", "used_words - start - 1", 0),
    "fused: an input too many": (fused_sums, "inside = k < dims", "inside = k <= dims", 0),
    "fused: inputs of the first slab": (fused_sums, "k = 16 * start + at", "k = at", 0),
    "fused: barrier before products": (fused_sums, BARRIER, "", 1),
    "fused: barrier after products": (fused_sums, BARRIER, "", 2),
    "fused: outputs beyond the last": (fused_sums, "&& first + n < outputs", "", 0),
    "fused: lanes not summed": (fused_sums, "simd_sum(sums[row][n])", "(sums[row][n])", 0),
    "fused: wrong matrix": (fused_sums, "block >= (outputs", "block > (outputs", 0),
    "fused: outputs of matrices before": (fused_sums, "before += outputs", "before += 32", 0),
    "fused: scale of another output": (fused_sums, "[0] == 1 ? 0 : output", "[0] == 1 ? 0 : 0", 1),
    "fused: scale of another matrix": (fused_sums, "scale0[", "scale1[", 0),
    "fused: residual of another row": (fused_sums, "residual[at]", "residual[output]", 0),
    "fused: residual left out": (fused_sums, "if (RESIDUAL)", "if (false)", 0),
    "fused: barrier of statistics": (fused_codes, BARRIER, "", 0),
    "fused: wrong scale": (fused_codes, "/ code_scales[row])", "/ code_scales[0])", 0),
    "fused: scale of codes": (fused_codes, "127.0f /", "128.0f /", 0),
    "fused: largest without own norm": (
        fused_codes,
        "abs(normed * weight_of_own)",
        "abs(normed)",
        0,
    ),
    "fused: first norm": (fused_codes, "if (NORM) factors", "if (false) factors", 0),
    "fused: norm weight": (fused_codes, "NORM && inside ?", "false ?", 0),
    "fused: own norm of another matrix": (fused_codes, "own_norm0[k]", "own_norm1[k]", 1),
    "fused: squares of another norm": (
        fused_codes,
        "squares[row] / size + epsilons[0]",
        "normed_squares[row] / size + epsilons[0]",
        0,
    ),
    "fused: epsilon of another norm": (fused_codes, "epsilons[1]", "epsilons[0]", 0),
    "fused: gate": (fused_codes, "value * sigmoid(value) * up", "sigmoid(value) * up", 0),
    "fused: gated by a neighbour": (fused_codes, "+ dims + k]", "+ dims + k - 1]", 0),
    "fused: half of a row": (fused_codes, "rows - 1) * width", "rows - 1) * dims", 0),
    "fused: ties": (fused_ties, "half_away ? round", "half_away ? rint", 0),
    "tiles: barrier before tiles are reused": (tiles, BARRIER, "", 0),
    "tiles: barrier before products": (tiles, BARRIER, "", 1),
    "tiles: codes of another place": (tiles, "? first[n", "? second[n", 0),
    "tiles: codes not centred": (tiles, "half(1152.0f)", "half(1151.0f)", 0),
    "tiles: codes of the tile before": (tiles, "x_at[i] += DEPTH / 4", "x_at[i] += DEPTH / 8", 0),
    "tiles: codes of another row": (
        tiles,
        "(first_scale + row) * code_words",
        "first_scale * code_words",
        0,
    ),
    "tiles: scale of codes of another set": (
        sets_in_tiles,
        "code_scales[first_scale + row]",
        "code_scales[row]",
        0,
    ),
    "tiles: codes of another set": (sets_in_tiles, "(first_scale + row)", "(0 + row)", 0),
    "tiles: last inputs": (tiles, "stop = 4 * code_words", "stop = 4 * code_words - 32", 0),
    "tiles: outputs beyond the last": (tiles, "row < rows && output < outputs", "row < rows", 0),
    "tiles: rows beyond the last": (tiles, "row < rows && output", "row <= rows && output", 0),
    "tiles: wrong matrix": (tiles, "block >= (outputs", "block > (outputs", 0),
    "tiles: blocks of the first matrix": (tiles, "block -= (outputs", "block -= 0 * (outputs", 0),
    "tiles: outputs of matrices before": (tiles, "before += outputs", "before += 32", 0),
    "tiles: scale of another matrix": (tiles, "scale0[", "scale1[", 0),
    "tiles: scale of another output": (tiles, "[0] == 1 ? 0 : output", "[0] == 1 ? 0 : 0", 1),
    "tiles: residual of another row": (tiles, "residual[at]", "residual[output]", 0),
    "tiles: residual left out": (tiles, "if (RESIDUAL)", "if (false)", 0),
    "many codes: barrier": (many_codes, BARRIER, "", 0),
    "many codes: ties": (many_codes, "half_away ? round", "half_away ? rint", 0),
    "many codes: gate": (many_codes, "value * sigmoid(value) * up", "sigmoid(value) * up", 0),
    "many codes: gated by a neighbour": (many_codes, "+ dims + k]", "+ dims + k - 1]", 1),
    "many codes: input of another row": (many_codes, "static_cast<size_t>(row) * width", "0", 0),
    "many codes: first norm": (many_codes, "if (NORM) factor", "if (false) factor", 0),
    "many codes: norm weight": (many_codes, "if (NORM && inside)", "if (false)", 0),
    "many codes: largest without norm": (
        many_codes,
        "NORM ? value * static_cast<float>(norm[k]) : value",
        "value",
        0,
    ),
    "many codes: largest without own norm": (many_codes, "? normed * ", "? normed + 0 * ", 0),
    "many codes: own norm of another matrix": (many_codes, "own_norm0[k]", "own_norm1[k]", 1),
    "many codes: epsilon of another norm": (many_codes, "epsilons[1]", "epsilons[0]", 0),
    "many codes: squares of another norm": (
        many_codes,
        "squares / size + epsilons[0]",
        "normed_squares / size + epsilons[0]",
        0,
    ),
    "many codes: largest of another set": (
        many_codes,
        "largest[chosen] * factor",
        "largest[0] * factor",
        0,
    ),
    "many codes: largest of one SIMD group": (
        many_codes,
        "statistics[16 * (2 + chosen) + lane]",
        "statistics[16 * (2 + chosen)]",
        0,
    ),
    "many codes: scale of another row": (many_codes, "chosen * rows + row]", "chosen * rows]", 0),
    "many codes: set of another matrix": (
        many_codes,
        "static_cast<size_t>(chosen) * rows",
        "static_cast<size_t>(0) * rows",
        0,
    ),
    "many codes: an input too many": (many_codes, "inside = k < dims", "inside = k <= dims", 0),
    "many codes: places": (many_codes, "16 * (n % 2) + 8 * (n / 2)", "8 * n", 0),
    "many codes: NaN": (many_bad_rows, "isnan(weighted) ? INFINITY", "false ? INFINITY", 0),
    "step: barrier": (step, BARRIER, "", 0),
    "step: bound": (step, "bound + (1.0f - bound) * f", "bound + f", 0),
    "step: mask": (step, "stays ? old", "false ? old", 0),
    "step: mask of another row": (step, "valid[row]", "valid[0]", 0),
    "step: epsilon left out": (step, "dims) + eps", "dims)", 0),
    "step: forget gate of another place": (step, "inputs + dims", "inputs + 2 * dims", 0),
    "step: old state": (step, "f * old +", "old +", 0),
    "step: new value": (step, "* (1.0f - f);", ";", 0),
    "step: last channel": (step, "k < dims;", "k < dims - 1;", 1),
    "positions: barrier": (positions, BARRIER, "", 0),
    "positions: bound": (positions, "bound + (1.0f - bound) * gate", "bound + gate", 0),
    "positions: bound of another channel": (positions, "lower_bound[channel]", "lower_bound[0]", 0),
    "positions: mask": (positions, "if (MASKED &&", "if (false &&", 1),
    "positions: mask of a chunk's product": (positions, "if (MASKED &&", "if (false &&", 0),
    "positions: value of a masked position": (positions, "input = 0;", "", 1),
    "positions: starts": (positions, "if (STARTS &&", "if (false &&", 1),
    "positions: starts at masked positions": (positions, "gate = 1;", "", 1),
    "positions: place": (positions, "* length + t;", "* length + t + 1;", 1),
    "positions: forget gate": (positions, "gates[inputs + dims]", "gates[inputs]", 1),
    "positions: new value": (positions, "* (1.0f - gate);", ";", 1),
    "positions: swish": (positions, "candidate * sigmoid", "sigmoid", 1),
    "positions: state of another row": (positions, "state[row]", "state[channel]", 0),
    "positions: last state": (positions, "chunk + 1 == chunks", "chunk == 0", 0),
    "gated norm: gate behind others": (
        positions_output,
        "(row + 1) * gate_shape[1] - dims",
        "row * gate_shape[1]",
        0,
    ),
    "gated norm: barrier": (gated_norm, BARRIER, "", 0),
    "gated norm: gate": (gated_norm, "normed * value * sigmoid", "normed * sigmoid", 0),
    "gated norm: epsilon left out": (gated_norm, "dims) + eps", "dims)", 0),
    "gated norm: last square": (gated_norm, "k < dims;", "k < dims - 1;", 0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    check, old, new, which = FAULTS[name]
    kernel = f"custom_kernel_{KERNELS[check]}_"
    edited = []

    def edit(text: str) -> str:
        parts = text.split(old)
        if kernel not in text or len(parts) < which + 2:
            return text
        edited.append(name)
        return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])

    # the check of users' machines would see most of these first
    monkeypatch.setattr(self_check, "_difference", lambda *_: None)
    monkeypatch.setattr(self_check, "_checks", {})
    emulated.edit = edit
    with pytest.raises((AssertionError, KernelError)):
        check()
    assert edited


@pytest.mark.parametrize("check", KERNELS)
def test_without_faults_all_is_well(check: Callable[[], None], emulated: Emulator) -> None:
    check()
    assert emulated.records
