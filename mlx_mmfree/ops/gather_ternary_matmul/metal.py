"""`gather_ternary_matmul` on Metal: a kernel for few rows, and that of MLX for more.

A SIMD group computes 4 outputs of a row, as the kernel of `ternary_matmul` for one row does, from the
words of the matrix that the row names. MLX's own takes launches for scales beside it, but shares words
among rows that name one matrix, which few rows seldom do.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.gradient import with_reference_gradient
from ..backend.metal_functions import PAIRS, TERNARY, keeps_half_denormals
from ..backend.self_check import packed_pattern
from ..float_dtypes import FLOATS
from ..ternary import CODES_PER_WORD, packed_width
from .definition import gradients, mlx_product, reference

MOST_ROWS = 64
GROUPS, OUTPUTS = 2, 4

# Lane l reads words l, l + 32, ... of its outputs. With halves, inputs are multiplied by codes, which
# are trits plus 1, and the inputs themselves are taken off after each word. A lane for which a scaled
# input is infinite begins again with trits.
_kernel = mx.fast.metal_kernel(
    name="gather_ternary_matmul",
    input_names=["x", "weight", "indices"],  # (rows, D), (E, N, W), (rows,)
    output_names=["out"],  # (rows, N)
    header=TERNARY + PAIRS,
    source="""
    constexpr int OUTPUTS = 4;
    const int dims = x_shape[1];
    const int outputs = weight_shape[1];
    const int words = weight_shape[2];
    const uint lane = thread_index_in_simdgroup;
    const uint row = threadgroup_position_in_grid.y;
    const int first = OUTPUTS * (threadgroup_position_in_grid.x * simdgroups_per_threadgroup
        + simdgroup_index_in_threadgroup);
    if (first >= outputs) return;

    // places behind the last output compute what the last one does, and store nothing
    const auto inputs = x + static_cast<size_t>(row) * dims;
    const auto weights = weight
        + (static_cast<size_t>(indices[row]) * outputs + first) * words;
    int word_line[OUTPUTS];
    float2 sums[OUTPUTS];  // of inputs in the low and in the high halves of words
    #pragma clang loop unroll(full)
    for (int n = 0; n < OUTPUTS; n++) {
        word_line[n] = min(n, outputs - 1 - first) * words;
        sums[n] = float2(0.0f);
    }
    for (int at = lane; 16 * at < dims; at += 32) {
        const int start = 16 * at;
        uint2 packed[OUTPUTS];
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            packed[n] = shifts_of<HALVES>(weights[word_line[n] + at]);
        }
        float2 total = float2(0.0f);
        #pragma clang loop unroll(full)
        for (int k = 0; k < 8; k++) {
            float2 pair;
            #pragma clang loop unroll(full)
            for (int half_word = 0; half_word < 2; half_word++) {
                const int place = start + k + 8 * half_word;
                pair[half_word] = WHOLE_WORDS || place < dims
                    ? static_cast<float>(inputs[place]) : 0.0f;
            }
            const float2 scaled = HALVES ? pair * (16777216.0f * unit_of_code(k)) : pair;
            total += pair;
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                sums[n] = fma(scaled, pair_at<HALVES>(packed[n], k), sums[n]);
            }
        }
        if (HALVES) {
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) sums[n] -= total;
        }
    }
    // infinity, NaN, or an input of which 2^24 times as much is infinite, spoils all sums
    if (HALVES && !(abs(sums[0][0] + sums[0][1]) < INFINITY)) {
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) sums[n] = float2(0.0f);
        for (int k = 16 * lane; k < dims; k += k % 16 == 15 ? 512 - 15 : 1) {
            const float value = static_cast<float>(inputs[k]);
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                const uint code = weights[word_line[n] + k / 16] >> (2 * (k % 16)) & 3u;
                sums[n][0] = fma(value, static_cast<float>(code) - 1.0f, sums[n][0]);
            }
        }
    }
    #pragma clang loop unroll(full)
    for (int n = 0; n < OUTPUTS; n++) {
        const float sum = simd_sum(sums[n][0] + sums[n][1]);
        if (lane == 0 && first + n < outputs) {
            out[static_cast<size_t>(row) * outputs + first + n] = sum;
        }
    }
    """,
)


def unsupported(x: mx.array, weight: mx.array, indices: mx.array) -> str | None:
    if x.dtype not in FLOATS:
        return f"it takes float32, float16 or bfloat16 activations, not {x.dtype}"
    if indices.size > MOST_ROWS:
        return None
    dims = x.shape[-1]
    is_whole = dims % CODES_PER_WORD == 0
    return self_check.kernel_fault(
        "gather_ternary_matmul",
        _few,
        reference,
        lambda: _check_inputs(544 if is_whole else 520, x.dtype),
        is_whole=is_whole,
        are_halves=keeps_half_denormals(),
        x=x.dtype,
    )


def _check_inputs(dims: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    x = (mx.arange(3 * dims) * 37 % 255 - 127).reshape(3, dims).astype(dtype)
    weight = packed_pattern(10, packed_width(dims)).reshape(2, 5, -1)
    return x, weight, mx.array([1, 0, 1], mx.uint32)


def metal(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    result: mx.array = _function(indices.size > MOST_ROWS)(x, weight, indices)
    return result


@cache
def _function(are_many: bool) -> Any:
    return with_reference_gradient(mlx_product if are_many else _few, reference, gradients)


def _few(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    rows, outputs, dims = indices.size, weight.shape[1], x.shape[-1]
    threads = GROUPS * launch.SIMD_GROUP
    (result,) = launch.launch(
        _kernel,
        inputs=[x.reshape(rows, dims), weight, indices.reshape(rows)],
        template=[
            ("WHOLE_WORDS", dims % CODES_PER_WORD == 0),
            ("HALVES", keeps_half_denormals()),
        ],
        grid=(-(-outputs // (GROUPS * OUTPUTS)) * threads, rows, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.float32],
    )
    return result.reshape(*x.shape[:-1], outputs)
