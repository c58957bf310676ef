"""Products of few rows with codes of 1, 2 and 6 bits: instructions of whole kernels, beside MLX's."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import mlx.core as mx

from mlx_mmfree.ops.backend import launch
from tests.emulator import apple_gpu
from tests.emulator.apple_gpu import Code
from tests.emulator.texts_of_mlx import product_of_codes

metal = import_module("mlx_mmfree.ops.dense_matmul.metal")

WIDTHS = (2048, 4096, 5120)
"""The inputs for which whole kernels are counted."""

_MLX_ENTRY = """
[[kernel]] void custom_kernel_qmv_fast(
    const device uint32_t* w [[buffer(0)]],
    const device float16_t* scales [[buffer(1)]],
    const device float16_t* biases [[buffer(2)]],
    const device float16_t* x [[buffer(3)]],
    device float16_t* y [[buffer(4)]],
    const constant int& dims [[buffer(5)]],
    const constant int& outputs [[buffer(6)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  qmv_fast_impl<float16_t, 128, <bits>>(w, scales, biases, x, y, dims, outputs,
      threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
}
"""


@dataclass(frozen=True)
class Count:
    """A kernel for codes.

    Attributes:
        name: What it computes.
        code: Its machine code.
        codes: Those that a lane takes in a round of its loop, for all outputs and rows.
        inputs: Those of a row for them.
        is_own: It is this library's. MLX's has code that only some widths run.
    """

    name: str
    code: Code
    codes: int
    inputs: int
    is_own: bool = True

    @property
    def loop(self) -> float:
        """Instructions of the loop for each weight and row."""
        return self.code.hot.instructions / self.codes

    def whole(self, dims: int) -> float:
        """Instructions of the whole kernel for each weight and row of so many inputs."""
        rounds = -(-dims // (self.inputs * launch.SIMD_GROUP))
        done = self.code.hot.instructions * rounds + self.code.outside.instructions
        return done / (self.codes / self.inputs * dims / launch.SIMD_GROUP)


def own_code(
    bits: int,
    rows: int,
    outputs: int,
    *,
    group_size: int = 128,
    are_halves: bool = True,
    dtype: mx.Dtype = mx.float16,
) -> Code:
    """The machine code of this library's kernel, with so many outputs of a SIMD group."""
    dims, own = 256, 2 * outputs
    floats = mx.zeros((own, dims // group_size), dtype)
    words = mx.zeros((own, dims * bits // 32), mx.uint32)
    tuning = metal.Tuning(bits, rows, outputs, are_halves)
    with launch.recording() as texts:
        metal._in_codes(
            mx.zeros((rows, dims), dtype), words, floats, floats, tuning=tuning, dtype=dtype
        )
    ((name, text),) = texts.items()
    return apple_gpu.machine_code(name, text, (metal.SIMD_GROUPS * launch.SIMD_GROUP, 1, 1))


def own(bits: int, rows: int, outputs: int | None = None, **options: bool | mx.Dtype) -> Count:
    """The count of this library's kernel, by default with the outputs of a matrix that fills a GPU."""
    if outputs is None:
        with launch.recording():
            outputs = metal.Tuning.of(bits, rows, 2**16).outputs
    code = own_code(bits, rows, outputs, **options)
    name = f"{_bits(bits)}, {rows} row{'s' * (rows > 1)}, {outputs} outputs"
    if options.get("are_halves") is False:
        name += ", without halves"
    if "dtype" in options:
        name += f", {str(options['dtype']).rpartition('.')[2]}"
    return Count(name, code, 32 * outputs * rows, 32)


def of_mlx(bits: int) -> Count:
    """MLX's kernel for one row, of which a lane takes 32, 16 or 8 codes of 4 outputs in a round."""
    entry = _MLX_ENTRY.replace("<bits>", str(bits))
    code = apple_gpu.machine_code("custom_kernel_qmv_fast", product_of_codes() + entry, (32, 2, 1))
    inputs = {1: 32, 2: 16, 4: 16, 6: 8, 8: 8}[bits]
    return Count(f"MLX's `qmv_fast`, {_bits(bits)}", code, 4 * inputs, inputs, is_own=False)


def _bits(bits: int) -> str:
    return f"{bits} bit{'s' * (bits > 1)}"


def counts() -> Iterator[Count]:
    """All rows of the table."""
    for bits in metal.BITS:
        for rows in range(1, metal.MOST_ROWS) if bits == 2 else (1, 4):
            yield own(bits, rows)
        yield own(bits, 1, 4)
        yield own(bits, 1, are_halves=False)
        yield own(bits, 1, dtype=mx.bfloat16)
        yield of_mlx(bits)


def table(found: list[Count]) -> str:
    """The table as Markdown."""
    widths = " | ".join(f"whole, {dims} inputs" for dims in WIDTHS)
    lines = [
        f"| product with codes, float16 | {widths} | hot loop | threads | stack, spills | bytes |",
        f"| --- |{' ---: |' * (len(WIDTHS) + 4)}",
    ]
    for count in found:
        code = count.code
        whole = [f"{count.whole(dims):.2f}" if count.is_own else "" for dims in WIDTHS]
        cells = [*whole, f"{count.loop:.2f}", f"{code.threads}", f"{code.stack}, {code.spills}"]
        lines.append(f"| {' | '.join([count.name, *cells, f'{code.bytes:,}'])} |")
    return "\n".join(lines)


def report() -> str:
    return table(list(counts()))
