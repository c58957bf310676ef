"""The kernel check sees faults that are planted in the kernels one by one."""

import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.native.conftest import NAMES
from tests.native.test_kernel_check import (
    CHECK,
    FLAGS,
    PORTABLE,
    SOURCES,
    X86,
    includes,
    run,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="built for x86-64"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


class Fault(NamedTuple):
    """A change of one file, and the file that is compiled with it."""

    file: str
    right: str
    wrong: str
    unit: str = "instruction_sets/portable.cpp"


AVX512 = "instruction_sets/avx512_vnni.cpp"

FAULTS = {
    "wrong shift of the activations": Fault(
        "ternary_matmul/permute.h", "fours[b] >> (8 * k)", "fours[b] >> (8 * (k ^ 1))"
    ),
    "wrong shift of the weights": Fault(
        "ternary_matmul/float_product.h",
        "trits = Isa::template trits<s>",
        "trits = Isa::template trits<s ^ 1>",
    ),
    "wrong shift of the transposed weights": Fault(
        "ternary_matmul/float_product.h", "Isa::template trits<S + s>", "Isa::template trits<S ^ 1>"
    ),
    "wrong offset of the codes": Fault(
        "ternary_matmul/side_by_side_tile.h", "totals[n] - sum", "totals[n] + sum"
    ),
    "missing tail": Fault(
        "ternary_matmul/code_stream.h", "if (byte < row_bytes) {", "if (byte > row_bytes) {"
    ),
    "tail one byte short": Fault(
        "ternary_matmul/side_by_side_tile.h",
        "memcpy(last[n], weight + n * row_bytes + byte, row_bytes - byte);",
        "memcpy(last[n], weight + n * row_bytes + byte, row_bytes - byte - 1);",
    ),
    "words of another group": Fault(
        "runtime/transpose.h",
        "every_second<1>(c, d, lanes)",
        "every_second<0>(c, d, lanes)",
        AVX512,
    ),
    "tile without its tail": Fault(
        "ternary_matmul/interleaved_tile.h",
        "if (byte < weight.row_bytes) {",
        "if (byte > weight.row_bytes) {",
        AVX512,
    ),
    "lanes merged twice": Fault(
        "instruction_sets/avx512_vnni.cpp",
        "_mm512_extracti64x4_epi64(lanes, 1)",
        "_mm512_extracti64x4_epi64(lanes, 0)",
        AVX512,
    ),
    "second row of a pair": Fault(
        "ternary_matmul/code_stream.h",
        "b = Isa::load(weight + distance + byte)",
        "b = Isa::load(weight + byte)",
        AVX512,
    ),
    "codes of the first block": Fault(
        "ternary_matmul/interleaved_tile.h",
        "word / kBlockWords * kBlockWeights",
        "0 * kBlockWeights",
        AVX512,
    ),
    "missing scale": Fault(
        "bit_linear/finish.h", "values[n] = sums[n] * factor;", "values[n] = sums[n];"
    ),
    "scale of another output": Fault(
        "bit_linear/finish.h", "r.scale[first + n]", "r.scale[(first + n) / 2]"
    ),
    "residual of another row": Fault(
        "bit_linear/finish.h", "widen<Isa>(r.residual, start,", "widen<Isa>(r.residual, first,"
    ),
    "wrong largest code": Fault("rms_norm_quantize/loops.h", "127.0f / (most", "126.0f / (most"),
    "padding is not zero": Fault(
        "bit_linear/prepare_row.h", "memset(scratch + dims, 0,", "memset(scratch + dims, 64,"
    ),
    "halves of the gate swapped": Fault(
        "bit_linear/prepare_row.h", "(2 * row + 1) * dims", "(2 * row) * dims"
    ),
    "ties up": Fault("runtime/floats.h", "+ 0x7fff +", "+ 0x8000 +"),
    "state of invalid positions": Fault(
        "mlgru_step/loops.h", "if (!s.valid || s.valid[row])", "if (s.valid)"
    ),
    "input gate without its forget gate": Fault(
        "mlgru_step/loops.h", "sigmoid<Isa>(i[c]) * (1.0f - forget)", "sigmoid<Isa>(i[c])"
    ),
    "column of another row": Fault(
        "attention/loops.h", "memcpy(&square[row], values,", "memcpy(&square[row / 2], values,"
    ),
    "key of the next token": Fault(
        "attention/attend.cpp",
        "token + 1 + call_.count",
        "token + 2 + call_.count",
        "attention/attend.cpp",
    ),
    "mask of another token": Fault(
        "attention/attend.cpp",
        "(start + t) * c.mask_token",
        "start * c.mask_token",
        "attention/attend.cpp",
    ),
    "query of another head": Fault(
        "attention/attend.cpp",
        "(head + row / tokens) * c.query_head",
        "head * c.query_head",
        "attention/attend.cpp",
    ),
    "hidden keys with a weight": Fault(
        "attention_step/loops.h", "seen[j] ? scores[j] : 0.0f", "scores[j]"
    ),
    "gradients of the wrong side": Fault(
        "attention/loops.h", "gradients[key] - delta", "gradients[key] + delta"
    ),
    "gradient of hidden scores": Fault(
        "attention/loops.h", "seen[key] ? gradients[key] : 0.0f", "gradients[key]"
    ),
    "product without the sum before": Fault("attention/loops.h", "if (p.adds) {", "if (false) {"),
    "queries before their keys": Fault(
        "attention/attend_gradient.cpp",
        "? first + c.length - c.count : 0",
        "? first + c.length - c.count + 1 : 0",
        "attention/attend_gradient.cpp",
    ),
    "a part of the keys left out": Fault(
        "attention/attend_gradient.cpp",
        "for (size_t part = 1; part < parts_; ++part)",
        "for (size_t part = 2; part < parts_; ++part)",
        "attention/attend_gradient.cpp",
    ),
    "slope of the value alone": Fault(
        "gated_activation/loops.h", "share + value * (1.0f - share)", "share"
    ),
    "gradients of gate and up exchanged": Fault(
        "gated_activation/loops.h", "slope[j] *= up[j] * d_y[j];", "slope[j] *= gate[j] * d_y[j];"
    ),
    "rows side by side": Fault("gated_activation/loops.h", "row * g.up.stride", "row * g.dims"),
    "maximum of the last part": Fault(
        "cross_entropy/loops.h", "most = own > most ? own : most;", "most = own;"
    ),
    "gradient without its target": Fault(
        "cross_entropy/loops.h", "values[target - start] -= factor;", "values[0] -= 0.0f;"
    ),
    "target of another class": Fault(
        "cross_entropy/loops.h",
        "target < 0 ? target + static_cast<int64_t>(classes)",
        "target < 0 ? 0",
    ),
    "norm without its mean": Fault(
        "rms_norm/loops.h", "(d_y[j] - x[j] * mean) * inverse", "d_y[j] * inverse"
    ),
    "gradient of a weight by itself": Fault(
        "rms_norm/loops.h", "d_weight[j] += d_y[j] * x[j];", "d_weight[j] = d_y[j] * x[j];"
    ),
    "gradient of codes without their scale": Fault(
        "rms_norm/loops.h", "d_y[j] *= scale;", "d_y[j] *= 1.0f;"
    ),
    "sums of a block twice": Fault("hadamard/loops.h", "b[j] = a_b + c_d;", "b[j] = a_b - c_d;"),
    "signs of another block": Fault(
        "hadamard/loops.h", "h.signs + item % blocks * h.block", "h.signs"
    ),
    "block without its scale": Fault(
        "hadamard/loops.h", "scratch[j] *= scale * signs[j];", "scratch[j] *= signs[j];"
    ),
    "row without its mean": Fault("layer_norm/loops.h", "x[j] -= mean;", "x[j] -= 0.0f;"),
    "gradient of a row without its mean's": Fault(
        "layer_norm/loops.h", "d_y[j] - mean - x[j] * slope", "d_y[j] - x[j] * slope"
    ),
    "gradient of another bias": Fault(
        "layer_norm/loops.h", "d_bias[j] += d_y[j];", "d_bias[j] += d_weight[j];"
    ),
    "share of the wrong tail": Fault(
        "runtime/normal_distribution.h", "x < 0.0f ? tail : 1.0f - tail", "tail"
    ),
    "values of the first part": Fault(
        "activate/loops.h", "a.y) + start * size_of(a.type)", "a.y) + 0 * size_of(a.type)"
    ),
    "gradient of the first part": Fault(
        "activate/loops.h",
        "widen<Isa>(a.d_y, start, count, d_y);",
        "widen<Isa>(a.d_y, 0, count, d_y);",
    ),
    "window without its first row": Fault(
        "depthwise_convolution/loops.h",
        "for (int64_t from = above; from <= below; ++from)",
        "for (int64_t from = above + 1; from <= below; ++from)",
    ),
    "tile of the first positions": Fault(
        "depthwise_convolution/loops.h", "(p.source + place * p.step)", "(p.source)"
    ),
    "weights the wrong way round": Fault(
        "depthwise_convolution/loops.h",
        "-static_cast<ptrdiff_t>(stride * kBlockChannels)",
        "static_cast<ptrdiff_t>(0 * stride)",
    ),
    "positions of another phase": Fault(
        "depthwise_convolution/loops.h",
        "from = start + phase + c.side / 2",
        "from = start + c.side / 2",
    ),
    "bias of the first channels": Fault(
        "depthwise_convolution/loops.h", "c.bias + block * kBlockChannels", "c.bias + 0 * block"
    ),
    "strip of the first rows": Fault(
        "depthwise_convolution/loops.h", "top = strip * kStripRows", "top = 0 * strip"
    ),
    "row stored too long": Fault(
        "depthwise_convolution/source_rows.h",
        "next_ <= below && next_ <",
        "next_ < below && next_ <",
    ),
    "map without zeros before it": Fault(
        "depthwise_convolution/source_rows.h",
        "column_ < 0 ? std::min<size_t>(-column_, width_) : 0",
        "0",
    ),
    "channels of the next block": Fault(
        "depthwise_convolution/source_rows.h",
        "widen<Isa>(map.floats, start + place * map.channels, map.count,",
        "widen<Isa>(map.floats, start + place * map.channels, map.count - 1,",
    ),
    "rows of a gradient rounded down": Fault(
        "depthwise_convolution/source_rows.h",
        "(from - half + step - 1) / step",
        "(from - half + step) / step",
    ),
    "last weights left out": Fault(
        "depthwise_convolution/weight_sums.h",
        "for (size_t tap = 0; tap < count; tap += kTaps)",
        "for (size_t tap = 0; tap + kTaps <= count; tap += kTaps)",
    ),
    "sums of the last positions": Fault(
        "depthwise_convolution/weight_sums.h", "totals[i] += sums[i];", "totals[i] = sums[i];"
    ),
    "gradient of one image": Fault(
        "depthwise_convolution/weight_sums.h",
        "const size_t image = row / c.target_rows;",
        "const size_t image = first / c.target_rows;",
    ),
    "rounded values without their step": Fault(
        "rms_norm_quantize/loops.h", "1.0f / quantize_row<Isa>(q, row)", "quantize_row<Isa>(q, row)"
    ),
    "ties of weights away from zero": Fault(
        "ternary_linear/loops.h", "(scaled > 0.5f)", "(scaled >= 0.5f)"
    ),
    "padding of weights is not zero": Fault(
        "ternary_linear/loops.h", "memset(codes + count, 1,", "memset(codes + count, 0,"
    ),
    "unpacked rows without their last trits": Fault(
        "ternary_linear/loops.h", "if (rest) {", "if (false) {"
    ),
    "sums of one block": Fault(
        "ternary_linear/loops.h", "row ? sums[c] + fabsf(values[c])", "row ? fabsf(values[c])"
    ),
    "angles of another position": Fault(
        "attention_step/attend.cpp",
        "static_cast<float>(position) * (1.0f",
        "static_cast<float>(position + 1) * (1.0f",
        "attention_step/attend.cpp",
    ),
    "pairs rotated the other way": Fault(
        "attention_step/loops.h", "a * cosines[i] - b * sines[i]", "a * cosines[i] + b * sines[i]"
    ),
    "slot of another token": Fault(
        "attention_step/slots.h",
        "sinks + (position - sinks) % window",
        "sinks + position % window",
        "attention_step/attend.cpp",
    ),
    "run without its last slot": Fault(
        "attention_step/attend.cpp",
        "std::min(kRunSlots, used_[row] - first)",
        "std::min(kRunSlots, used_[row] - first) - (first ? 1 : 0)",
        "attention_step/attend.cpp",
    ),
    "runs without their peaks": Fault(
        "attention_step/loops.h", "exponential<Isa>(r.peaks[run * r.distance] - peak)", "1.0f"
    ),
    "weights of another head": Fault(
        "attention_step/loops.h", "weights[m * r.slots + slot]", "weights[slot]"
    ),
    "outputs beyond the matrix": Fault(
        "bit_linear/project.cpp",
        "std::min((end - start) * kGroup, outputs) - output",
        "(end - start) * kGroup - output",
        "bit_linear/project.cpp",
    ),
    "codes of another norm": Fault(
        "bit_linear/project.cpp",
        "(has_norms_ ? p : 0) * panel.rows",
        "0 * p * panel.rows",
        "bit_linear/project.cpp",
    ),
    "last odd key not read": Fault(
        "gated_delta_rule/loops.h", "read(key, even);\n    }\n    memcpy", "}\n    memcpy"
    ),
    "read after the decay": Fault("gated_delta_rule/loops.h", "h.a.at(t)", "h.k.at(t)"),
    "added what is to be removed": Fault(
        "gated_delta_rule/loops.h", "Isa::zero() - taken", "taken - Isa::zero()"
    ),
    "gate of the first key for all": Fault("gated_delta_rule/loops.h", "h.gates == 1 ? 0 : 1", "0"),
    "columns from memory in scratch": Fault(
        "gated_delta_rule/loops.h",
        "std::fill(row + count, row + kColumns, 0.0f);\n  }\n  move_columns<Isa, V>(h, output, first",
        "}\n  move_columns<Isa, V>(h, output, 0",
    ),
    "gradient of the state before its gates": Fault(
        "gated_delta_rule/loops.h", "f[n] * gradient[n] + d_taken", "gradient[n] + d_taken"
    ),
    "gradient of what was read left out": Fault(
        "gated_delta_rule/loops.h", "d_a[n] += d_taken * before[n]", "d_a[n] += 0 * before[n]"
    ),
    "states of another segment": Fault(
        "gated_delta_rule/loops.h", "s.begins + segment * size_", "s.begins"
    ),
    "missing barrier": Fault(
        "runtime/thread_pool.cpp", "while (inside != 0)", "while (false)", "runtime/thread_pool.cpp"
    ),
    "chunk done twice": Fault(
        "runtime/thread_pool.cpp",
        "first = owner.next.fetch_add(step_);",
        "first = owner.next.load(); owner.next.store(first + step_);",
        "runtime/thread_pool.cpp",
    ),
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The object file of every source file, compiled as it is."""
    folder = tmp_path_factory.mktemp("objects")
    units = {name: folder / f"{n}.o" for n, name in enumerate([*PORTABLE, *X86, str(CHECK)])}
    for name, target in units.items():
        flags = [*FLAGS, *includes(folder), "-O1", *X86.get(name, [])]
        run(["c++", *flags, "-c", SOURCES / name, "-o", target])
    return units


def checked(objects: dict[str, Path], folder: Path) -> subprocess.CompletedProcess:
    program = folder / "kernel_check"
    run(["c++", *objects.values(), "-pthread", "-o", program])
    return subprocess.run(
        [program, "portable"], capture_output=True, text=True, timeout=60, check=False
    )


def test_kernels_as_they_are_pass(objects: dict[str, Path], tmp_path: Path) -> None:
    assert checked(objects, tmp_path).returncode == 0


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name: str, objects: dict[str, Path], tmp_path: Path) -> None:
    fault = FAULTS[name]
    if fault.unit in X86 and Path(fault.unit).stem not in NAMES:
        pytest.skip(f"this processor lacks the instructions of {fault.unit}")
    sources = tmp_path / "native"
    shutil.copytree(SOURCES, sources)
    file = sources / fault.file
    text = file.read_text()
    assert fault.right in text
    file.write_text(text.replace(fault.right, fault.wrong))
    target = tmp_path / "fault.o"
    flags = [*FLAGS, *includes(tmp_path, sources), *X86.get(fault.unit, [])]
    run(["c++", *flags, "-O1", "-c", sources / fault.unit, "-o", target])
    assert checked(objects | {fault.unit: target}, tmp_path).returncode != 0
