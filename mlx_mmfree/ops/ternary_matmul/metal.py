"""`ternary_matmul` on Metal: a kernel for some tens of rows and one for more."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.metal_functions import TERNARY
from ..backend.self_check import kernel_fault, packed_pattern
from ..ternary import packed_width
from . import reference

FEW_ROWS = 48
"""Largest number of rows that are computed in groups."""

CODES_PER_WORD = 16
DECODE_GROUPS = 2
DECODE_OUTPUTS = 4
PREFILL_THREADS = 128
PREFILL_TILE = 64

# The type in which a tile of activations keeps their exact values.
_TILE_TYPES = {
    mx.float32: mx.float32,
    mx.bfloat16: mx.float32,
    mx.float16: mx.float16,
    mx.int8: mx.float16,
}

# A SIMD group computes 4 outputs of a group of rows. Lane l reads words l, l + 32, ... of their
# weights, so that neighbouring lanes read neighbouring words.
_decode = mx.fast.metal_kernel(
    name="ternary_matmul_decode",
    input_names=["x", "weight"],  # (rows, D), (N, W)
    output_names=["out"],  # (rows, N)
    header=TERNARY,
    source="""
    constexpr int OUTPUTS = 4;
    const int rows = x_shape[0];
    const int dims = x_shape[1];
    const int outputs = weight_shape[0];
    const int words = weight_shape[1];
    const int lane = thread_index_in_simdgroup;
    const int first_row = ROWS * threadgroup_position_in_grid.y;
    const int first = OUTPUTS * (threadgroup_position_in_grid.x * simdgroups_per_threadgroup
        + simdgroup_index_in_threadgroup);
    if (first >= outputs) return;

    // places behind the last row or output compute what the last one does, and store nothing
    const auto inputs = x + static_cast<size_t>(first_row) * dims;
    const auto weights = weight + static_cast<size_t>(first) * words;
    int input_line[ROWS];
    int word_line[OUTPUTS];
    float4 sums[ROWS];  // of the 4 outputs
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        input_line[row] = min(row, rows - 1 - first_row) * dims;
        sums[row] = float4(0.0f);
    }
    #pragma clang loop unroll(full)
    for (int n = 0; n < OUTPUTS; n++) word_line[n] = min(n, outputs - 1 - first) * words;

    for (int word = lane; 16 * word < dims; word += 32) {
        uint4 packed;
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) packed[n] = weights[word_line[n] + word];
        #pragma clang loop unroll(full)
        for (int k = 0; k < 16; k++) {
            const float4 trits = trits_at(under_exponent(packed, k - k % 8), k % 8);
            #pragma clang loop unroll(full)
            for (int row = 0; row < ROWS; row++) {
                const float value = WHOLE_WORDS || 16 * word + k < dims
                    ? static_cast<float>((inputs + (input_line[row] + 16 * word))[k]) : 0.0f;
                sums[row] = fma(float4(value), trits, sums[row]);
            }
        }
    }
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            const float sum = simd_sum(sums[row][n]);
            if (lane == 0 && first_row + row < rows && first + n < outputs) {
                out[static_cast<size_t>(first_row + row) * outputs + first + n] = sum;
            }
        }
    }
    """,
)

# A threadgroup computes a tile of 64 rows and 64 outputs, each of its 4 SIMD groups a quarter of it.
# 32 inputs at a time are laid out in threadgroup memory, the weights as trits.
_prefill = mx.fast.metal_kernel(
    name="ternary_matmul_prefill",
    input_names=["x", "weight"],  # (rows, D), (N, W)
    output_names=["out"],  # (rows, N)
    header=TERNARY,
    source="""
    constexpr int TILE = 64, DEPTH = 32, THREADS = 128;
    // lines of the tiles are a little longer than they need be, to spread them over memory banks
    constexpr int X_LINE = DEPTH + 4, TRITS_LINE = DEPTH + 8;
    threadgroup TileType x_tile[TILE * X_LINE];
    threadgroup half trits_tile[TILE * TRITS_LINE];
    threadgroup float strips[4 * 8 * 32];

    const int rows = x_shape[0];
    const int dims = x_shape[1];
    const int outputs = weight_shape[0];
    const int words = weight_shape[1];
    const int index = thread_index_in_threadgroup;
    const int lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;
    const int first_row = threadgroup_position_in_grid.y * TILE;
    const int first_output = threadgroup_position_in_grid.x * TILE;
    const int tile_row = 32 * (group / 2);
    const int tile_output = 32 * (group % 2);

    simdgroup_matrix<float, 8, 8> sums[4][4];
    #pragma clang loop unroll(full)
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int start = 0; start < dims; start += DEPTH) {
        for (int at = index; at < TILE * DEPTH; at += THREADS) {
            const int row = at / DEPTH;
            const int k = at % DEPTH;
            const bool inside = first_row + row < rows && start + k < dims;
            x_tile[row * X_LINE + k] = inside
                ? static_cast<TileType>(static_cast<float>(
                    x[static_cast<size_t>(first_row + row) * dims + start + k]))
                : static_cast<TileType>(0.0f);
        }
        // one word for each thread
        const int n = index / 2;
        const uint codes = first_output + n < outputs
            ? weight[static_cast<size_t>(first_output + n) * words + start / 16 + index % 2]
            : 0x55555555u;
        for (int k = 0; k < 16; k++) {
            const int trit = static_cast<int>((codes >> (2 * k)) & 3) - 1;
            trits_tile[n * TRITS_LINE + 16 * (index % 2) + k] = static_cast<half>(trit);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < DEPTH; k += 8) {
            simdgroup_matrix<TileType, 8, 8> left[4];
            simdgroup_matrix<half, 8, 8> right[4];
            #pragma clang loop unroll(full)
            for (int i = 0; i < 4; i++) {
                simdgroup_load(left[i], x_tile + (tile_row + 8 * i) * X_LINE + k, X_LINE);
            }
            #pragma clang loop unroll(full)
            for (int j = 0; j < 4; j++) {
                simdgroup_load(
                    right[j], trits_tile + (tile_output + 8 * j) * TRITS_LINE + k, TRITS_LINE, 0, true);
            }
            #pragma clang loop unroll(full)
            for (int i = 0; i < 4; i++) {
                #pragma clang loop unroll(full)
                for (int j = 0; j < 4; j++) {
                    simdgroup_multiply_accumulate(sums[i][j], left[i], right[j], sums[i][j]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // 8 rows and 32 outputs at a time
    threadgroup float* strip = strips + group * 8 * 32;
    #pragma clang loop unroll(full)
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) simdgroup_store(sums[i][j], strip + 8 * j, 32);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (int r = 0; r < 8; r++) {
            const int row = first_row + tile_row + 8 * i + r;
            const int n = first_output + tile_output + lane;
            if (row < rows && n < outputs) {
                out[static_cast<size_t>(row) * outputs + n] = strip[r * 32 + lane];
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    """,
)


def unsupported(x: mx.array, weight: mx.array, *, codes: bool) -> str | None:
    if x.dtype not in _TILE_TYPES:
        return f"it takes float32, float16, bfloat16 or int8 activations, not {x.dtype}"
    dims = x.shape[-1]
    rows = x.size // dims
    whole_words = dims % CODES_PER_WORD == 0
    is_few = rows <= FEW_ROWS
    checked_rows = launch.rows_of_a_group(rows) if is_few else FEW_ROWS + 1
    return kernel_fault(
        "ternary_matmul_decode" if is_few else "ternary_matmul_prefill",
        partial(_sums, codes=codes),
        _reference,
        # more words than lanes
        lambda: _check_inputs(checked_rows, 528 if whole_words else 520, x.dtype),
        rows=checked_rows,
        whole_words=whole_words,
        x=x.dtype,
        codes=codes,
    )


def run(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    result: mx.array = (_code_product if codes else _product)(x, weight)
    return result


def _check_inputs(rows: int, dims: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    codes = (mx.arange(rows * dims) * 37 % 255 - 127).reshape(rows, dims)
    return codes.astype(dtype), packed_pattern(5, packed_width(dims))


def _reference(x: mx.array, weight: mx.array) -> mx.array:
    return reference.run(x, weight, codes=False)


def _sums(x: mx.array, weight: mx.array, codes: bool = False) -> mx.array:
    *leading, dims = x.shape
    rows = x.size // dims
    product = _in_groups if rows <= FEW_ROWS else _in_tiles
    return product(x.reshape(rows, dims), weight, codes).reshape(*leading, weight.shape[0])


def _in_groups(x: mx.array, weight: mx.array, codes: bool) -> mx.array:
    """Groups of rows, each of which reads the weights."""
    rows, dims = x.shape
    outputs = weight.shape[0]
    group_rows = launch.rows_of_a_group(rows)
    threads = DECODE_GROUPS * launch.SIMD_GROUP
    (result,) = launch.launch(
        _decode,
        inputs=[x, weight],
        template=[("ROWS", group_rows), ("WHOLE_WORDS", dims % CODES_PER_WORD == 0)],
        grid=(-(-outputs // (DECODE_GROUPS * DECODE_OUTPUTS)) * threads, -(-rows // group_rows), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.float32],
    )
    return result


def _in_tiles(x: mx.array, weight: mx.array, codes: bool) -> mx.array:
    """Tiles of rows and outputs, multiplied by the units for small matrices."""
    rows, outputs = x.shape[0], weight.shape[0]
    (result,) = launch.launch(
        _prefill,
        inputs=[x, weight],
        # codes are exact in half, whatever type holds them
        template=[("TileType", mx.float16 if codes else _TILE_TYPES[x.dtype])],
        grid=(-(-outputs // PREFILL_TILE) * PREFILL_THREADS, -(-rows // PREFILL_TILE), 1),
        threadgroup=(PREFILL_THREADS, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.float32],
    )
    return result


def _gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array | None, ...]:
    x, weight = inputs
    ones = mx.ones((weight.shape[0], weight.shape[1] // 2))
    gradient = mx.quantized_matmul(
        cotangents[0], weight, ones, -ones, transpose=False, group_size=32, bits=2
    )
    return gradient[..., : x.shape[-1]].astype(x.dtype), None


_product = with_reference_gradient(_sums, _reference, _gradients)
_code_product = with_reference_gradient(partial(_sums, codes=True), _reference, _gradients)
