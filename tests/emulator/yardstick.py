"""The cost of a decoded token's kernels on an Apple GPU, counted in its machine code.

    python -m tests.emulator.yardstick [--write]

Prints the table of `mlx_mmfree/ops/README.md`, or writes it there, and then what each file of
`tests/emulator/counts` reports. Nothing is timed: `apple_gpu.py` says where the compiler comes from.
"""

import argparse
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

from mlx_mmfree.evaluation import kernel_slots
from mlx_mmfree.ops import gated_delta_rule, use_backend
from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.backend.gpu_cores import MAX_CORES, OTHER_CORES, ULTRA_CORES
from mlx_mmfree.ops.backend.launch import generated_text
from mlx_mmfree.ops.bit_linear import Options, metal_tuning
from mlx_mmfree.ops.bit_linear.definition import Variant
from mlx_mmfree.ops.bit_linear.metal_tuning import Tuning
from mlx_mmfree.ops.inspection import kernel_texts
from tests.emulator import apple_gpu, counts
from tests.emulator.apple_gpu import Code
from tests.emulator.attention_texts import text_of_attention
from tests.emulator.counts import bit_linear, codes, products
from tests.emulator.texts_of_mlx import text_of

PAGE = Path(__file__).parents[2] / "mlx_mmfree/ops/README.md"
_BEGIN, _END = "<!-- counted -->", "<!-- end -->"
WIDTHS = (2560, 6912)
"""The inputs of a row for which whole kernels are counted."""


@dataclass(frozen=True)
class Row:
    """A kernel in the table.

    Attributes:
        name: What it computes.
        code: Its machine code.
        loop: Instructions of its hot loop for each weight, or element, and row.
        whole: Those of the whole kernel by the inputs of a row, or none.
        slots: Slots of issue in its hot loop, for each element.
    """

    name: str
    code: Code
    loop: float
    slots: float
    whole: tuple[float, ...] = ()


def rows() -> Iterator[Row]:
    """All rows of the table."""
    for count, outputs in ((1, 4), (1, 8), (1, 10), (2, 8), (3, 4), (4, 4), (5, 4)):
        yield _bit_linear(f"`bit_linear`, {count} row{'s' * (count > 1)}", count, outputs)
    for name, options in (
        ("gate `silu`", bit_linear.options(gate="silu")),
        ("gate `relu2`", bit_linear.options(gate="relu2")),
        ("norm", bit_linear.options(has_norm=True)),
        ("own norm", bit_linear.options(eps=1e-6)),
        ("no codes", bit_linear.options(quantize=False)),
    ):
        yield _bit_linear(f"`bit_linear`, 1 row, {name}", 1, 8, options)
    yield _bit_linear("`bit_linear`, 1 row, without halves", 1, 4, are_halves=False)
    texts = kernel_texts()
    for count, halves in ((1, 1), (4, 0)):
        code = _code(texts, f"ternary_matmul_decode__{count}_1_{halves}_float16_t_", 64)
        weights = 64 * count
        whole = code.hot.instructions * (WIDTHS[0] // 512) + code.outside.instructions
        per_weight = whole / (WIDTHS[0] / 32 * 4) / count
        yield Row(
            f"`ternary_matmul`, {count} row{'s' * (count > 1)}",
            code,
            code.hot.instructions / weights,
            code.hot.slots / weights,
            (per_weight,),
        )
    for part in ("gather_ternary_matmul__2_2_1_1_1_1", "gather_affine_matmul__8_2_1_1_1_1"):
        # two rows of a matrix, 8 outputs
        code = _code(texts, f"{part}_", 64, "float16_t")
        loop, kind = code.hot, part.partition("__")[0]
        yield Row(f"`{kind}`, 2 rows", code, loop.instructions / 256, loop.slots / 256)
    yield from _of_others()
    yield from of_attention()
    yield from of_the_delta_rule()
    yield from of_rotation()
    for name, part, threads, elements in (
        ("`mlgru_step`", "mlgru_step__float16_t_1_0_1_float16_t_", 512, 4),
        ("`mlgru_step`, positions", "mlgru_scan__1_0_0_uint32_t_float16_t_", 512, 1),
        ("`linear_scan`", "linear_scan_forward__uint32_t_float16_t_", 512, 1),
        ("`linear_scan`, gradient", "linear_scan_backward__uint32_t_float16_t_", 512, 1),
        ("`rms_norm_quantize`", "rms_norm_quantize__1_1_0_1_float16_t_", 512, 4),
        ("`gated_rms_norm`", "gated_rms_norm__float16_t_1_", 512, 4),
        ("`depthwise_convolution`", "depthwise_convolution__float16_t_3_1_", 256, 1),
    ):
        code = _code(texts, part, threads)
        yield Row(name, code, code.hot.instructions / elements, code.hot.slots / elements)


def other_kernels() -> Iterator[tuple[str, Code]]:
    """One kernel of each other kind that has no instructions for matrices, in float16 if it can be."""
    chosen: dict[str, tuple[str, str]] = {}
    for name, text in kernel_texts().items():
        kind = re.split(r"__|_(?:b?float|uint)", name.removeprefix("custom_kernel_"))[0]
        is_better = kind not in chosen or (
            "float16_t" in name and "float16_t" not in chosen[kind][0]
        )
        if is_better and "simdgroup_matrix" not in text:
            chosen[kind] = name, text
    for kind, (name, text) in chosen.items():
        yield kind, apple_gpu.machine_code(name, text, (256, 1, 1))


def _bit_linear(
    name: str,
    count: int,
    outputs: int,
    options: Options | None = None,
    *,
    are_halves: bool = True,
) -> Row:
    """The product of `count` rows of float16 with a matrix, `outputs` in a SIMD group."""
    counted = bit_linear.of(count, outputs, options, are_halves=are_halves)
    code, loop = counted.code, counted.code.loops[-1]
    whole = [counted.whole(dims) for dims in WIDTHS]
    weights = 16 * outputs * count
    return Row(
        f"{name}, {outputs} outputs",
        code,
        loop.instructions / weights,
        loop.slots / weights,
        tuple(whole),
    )


def _of_others() -> Iterator[Row]:
    """The same work in MLX's kernel for products with codes, and in mlx-lm's for BitNet."""
    for bits, name in ((2, "product alone"), (1, "codes of 1 bit")):
        count = codes.of_mlx(bits)
        slots = count.code.hot.slots / count.codes
        yield Row(f"MLX's `qmv_fast`, {name}", count.code, count.loop, slots)
    if importlib.util.find_spec("mlx_lm") is None:
        return
    from mlx_lm.models.bitlinear_layers import make_bitlinear_kernel

    with patch.object(mx.metal, "is_available", lambda: True):
        bitnet = make_bitlinear_kernel()
    dims = outputs = WIDTHS[0]
    name, text = generated_text(
        bitnet,
        [mx.zeros((1, dims), mx.float16), mx.zeros((outputs // 4, dims), mx.uint8), mx.ones((1,))],
        template=[
            ("T", mx.float16),
            ("invert_weight_scales", True),
            ("in_features", dims),
            ("out_features", outputs),
        ],
        grid=(32, outputs // 4, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1, outputs)],
        output_dtypes=[mx.float16],
        init_value=None,
    )
    code = apple_gpu.machine_code(name, text, (32, 1, 1))
    whole = [
        (code.hot.instructions * width // 128 + code.outside.instructions) / (width / 32 * 4)
        for width in WIDTHS
    ]
    loop = code.hot
    yield Row("mlx-lm's BitNet kernel", code, loop.instructions / 16, loop.slots / 16, tuple(whole))


_MLX_ROTATION = """
[[kernel]] void custom_kernel_hadamard_n(
    const device float16_t* in [[buffer(0)]],
    device float16_t* out [[buffer(1)]],
    const constant float& scale [[buffer(2)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  hadamard_n<float16_t, 1024, 16, 4>(in, out, scale, thread_position_in_grid,
      threads_per_threadgroup);
}
"""


def of_rotation() -> Iterator[Row]:
    """Blocks of 1024 in rows of 5120, all instructions for each number: there is no hot loop.

    A round of the loop that finds the mean square of a row takes four numbers a thread.
    """
    numbers, block, dims = 16, 1024, 5120
    threads = block // numbers
    texts = kernel_texts()
    for kind in ("", "_of_norm", "_of_sum", "_of_gate"):
        code = _code(texts, f"hadamard{kind}__float16_t_1024_16_1_0_", threads)
        yield _of_numbers(f"`hadamard{kind}`", code, numbers, dims // (4 * threads))
    text = text_of("hadamard.h")
    text = text[text.index("template <short R>") : text.index("template <typename T, int N, int M")]
    text = re.sub(r"\[\[.*?\]\]", "", text.replace("[[kernel]] ", "inline "))
    text = text.replace("STEEL_PRAGMA_UNROLL", "#pragma clang loop unroll(full)")
    code = apple_gpu.machine_code("custom_kernel_hadamard_n", text + _MLX_ROTATION, (threads, 1, 1))
    yield _of_numbers("MLX's `hadamard_n`, without signs", code, numbers, 0)


def _of_numbers(name: str, code: Code, numbers: int, rounds: int) -> Row:
    """Of a kernel that computes some numbers a thread, all its loops in as many rounds."""
    instructions = code.outside.instructions + rounds * sum(a.instructions for a in code.loops)
    slots = code.outside.slots + rounds * sum(loop.slots for loop in code.loops)
    return Row(name, code, instructions / numbers, slots / numbers)


_MLX_ATTENTION = """
[[kernel]] void custom_kernel_sdpa_vector(
    const device float16_t* queries [[buffer(0)]],
    const device float16_t* keys [[buffer(1)]],
    const device float16_t* values [[buffer(2)]],
    device float16_t* out [[buffer(3)]],
    const constant int& shared_by [[buffer(4)]],
    const constant int& count [[buffer(5)]],
    const constant size_t& head_stride [[buffer(6)]],
    const constant size_t& stride [[buffer(7)]],
    const constant float& scale [[buffer(8)]],
    const device bool* mask [[buffer(9)]],
    const constant int& mask_stride [[buffer(10)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  threadgroup float outputs[32 * 32];
  threadgroup float max_scores[32];
  threadgroup float sum_exp_scores[32];
  sdpa_vector<float16_t, 128, 128>(queries, keys, values, out, shared_by, count, head_stride, stride,
      head_stride, stride, scale, mask, queries, mask_stride, mask_stride, mask_stride, queries, count,
      threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup, outputs, max_scores, sum_exp_scores);
}
"""
# what MLX's kernel is compiled for: a mask of booleans
_CONSTANTS = {"has_mask", "bool_mask"}


def of_attention() -> Iterator[Row]:
    """Attention of a decoded token, 128 dims a head, for each number of a key and its value."""
    dims = 128
    for name, options in (
        ("`attention_step`", {}),
        ("`attention_step`, gated", {"is_gated": True}),
        ("`attention_step`, with a window", {"is_windowed": True}),
        ("`attention_step`, bfloat16", {"dtype": mx.bfloat16}),
        ("`attention_step`, in parts", {"parts": 2}),
    ):
        kernel, text = text_of_attention(dims, **options)
        yield _of_slots(name, apple_gpu.machine_code(kernel, text, (512, 1, 1)), dims)
    text = text_of("sdpa_vector.h")
    text = text[
        text.index("constant bool has_mask") : text.index(
            "template <typename T, int D, int V = D, int TK"
        )
    ]
    for word, name in re.findall(r"constant (bool|int) (\w+) \[\[.*?\]\];", text):
        value = str(name in _CONSTANTS).lower() if word == "bool" else "1"
        text = re.sub(
            rf"constant {word} {name} \[\[.*?\]\];",
            f"constant constexpr {word} {name} = {value};",
            text,
        )
    text = re.sub(r"\[\[.*?\]\]", "", text.replace("[[kernel]] ", "inline ")).replace(
        "thread U", "U"
    )
    text = re.sub(r"Limits<\w>::finite_min", "-65504.0f", text).replace("fast::exp", "exp")
    shared = re.findall(r"  threadgroup U (\w+)\[.*\];\n", text)
    text = re.sub(r"  threadgroup U \w+\[.*\];\n", "", text)
    own = "".join(f", threadgroup float* {name}" for name in shared)
    text = text.replace("uint simd_lid )", f"uint simd_lid{own})")
    code = apple_gpu.machine_code("custom_kernel_sdpa_vector", text + _MLX_ATTENTION, (1024, 1, 1))
    yield _of_slots("MLX's `sdpa_vector`, with a mask", code, dims)


def _of_slots(name: str, code: Code, dims: int) -> Row:
    """The loop over slots of the cache: the only one, or that after the one that turns angles."""
    loop = code.loops[min(1, len(code.loops) - 1)]
    return Row(name, code, loop.instructions / (dims / 32), loop.slots / (dims / 32))


def of_the_delta_rule() -> Iterator[Row]:
    """A decoded position of 8 heads of 128 dims, all instructions for each number of the state."""
    row, one = mx.zeros((1, 8, 1, 128)), mx.zeros((1, 8, 1, 1))
    state = mx.zeros((1, 8, 128, 128))
    for name, gate in (("a gate for each head", one), ("for each key", row)):
        with use_backend("metal"), launch.recording() as texts:
            gated_delta_rule(row, row, row, None, gate, state)
        # those before it check the kernel
        *_, (kernel, text) = texts.items()
        code = apple_gpu.machine_code(kernel, text, (256, 1, 1))
        # a thread has 16 rows of 4 columns
        yield _of_numbers(f"`gated_delta_rule`, {name}", code, 64, 1)
    if importlib.util.find_spec("mlx_lm") is None:
        return
    from mlx_lm.models.gated_delta import _make_gated_delta_kernel

    row, one = (x.swapaxes(1, 2) for x in (row, one[..., 0]))
    for name, gate in (("a gate for each head", one), ("for each key", row)):
        with patch.object(mx.metal, "is_available", lambda: True):
            step = _make_gated_delta_kernel(vectorized=gate is row)
        kernel, text = generated_text(
            step,
            [row, row, row, gate, one, state, mx.array(1)],
            template=[
                *(("InT", mx.float32), ("StT", mx.float32)),
                *(("Dk", 128), ("Dv", 128), ("Hk", 8), ("Hv", 8)),
            ],
            grid=(32, 128, 8),
            threadgroup=(32, 4, 1),
            output_shapes=[row.shape, state.shape],
            output_dtypes=[mx.float32, mx.float32],
            init_value=None,
        )
        code = apple_gpu.machine_code(kernel, text, (32, 4, 1))
        yield _of_numbers(f"mlx-lm's delta rule, {name}", code, 4, 1)


def _code(texts: dict[str, str], part: str, threads: int, dtype: str = "") -> Code:
    """Of the first kernel with a part in its name, and a dtype."""
    found = ((name, text) for name, text in texts.items() if part in name and dtype in name)
    name, text = next(found)
    return apple_gpu.machine_code(name, text, (threads, 1, 1))


def threadgroups(outputs: int, cores: Sequence[int]) -> str:
    """The threadgroups of a row's product with a matrix of so many outputs, on chips of such cores."""
    with patch.object(metal_tuning, "cores", lambda: cores):
        tuning = Tuning.of(Variant.of(Options()), 1, WIDTHS[0], [outputs])
    count = metal_tuning.blocks([outputs], tuning.simd_groups * tuning.outputs)
    return f"{count} of {tuning.simd_groups} x {tuning.outputs}"


def table(found: list[Row]) -> str:
    """The table as Markdown."""
    lines = [
        "| kernel, float16 | whole, 2560 inputs | whole, 6912 inputs | hot loop | slots of issue "
        "| threads | stack, spills | bytes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        whole = [f"{number:.2f}" for number in row.whole] + ["", ""]
        code = row.code
        registers = f"{code.stack}, {code.spills}"
        cells = [*whole[:2], f"{row.loop:.2f}", f"{row.slots:.2f}", f"{code.threads}", registers]
        lines.append(f"| {' | '.join([row.name, *cells, f'{code.bytes:,}'])} |")
    sizes = (1024, 2560, 6912)
    lines += [
        "",
        "Threadgroups of one row's `bit_linear` with 2560 inputs, as SIMD groups x outputs of each:",
        "",
        f"| GPU cores | {' | '.join(f'{size} outputs' for size in sizes)} |",
        f"| --- |{' ---: |' * len(sizes)}",
    ]
    for cores in (OTHER_CORES, MAX_CORES, ULTRA_CORES):
        with launch.recording():
            cells = [threadgroups(size, cores) for size in sizes]
        lines.append(f"| {' to '.join(map(str, cores))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def reports() -> Iterator[str]:
    """Costs of each kind of kernels."""
    for file in pkgutil.iter_modules(counts.__path__, f"{counts.__name__}."):
        module = importlib.import_module(file.name)
        # others only help to make the table
        if hasattr(module, "report"):
            yield f"{file.name.rpartition('.')[2]}:\n\n{module.report()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the table to its page, and slots to the package"
    )
    args = parser.parse_args()
    if reason := apple_gpu.unavailable():
        sys.exit(reason)
    if not args.write:
        print(table(list(rows())))
        for report in reports():
            print(f"\n{report}", flush=True)
        return
    kernel_slots.FILE.write_text(products.as_json(products.counted()), encoding="utf-8")
    counted = f"{table(list(rows()))}\n\n{codes.report()}"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}\n\n{counted}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
