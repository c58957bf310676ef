"""`bit_linear` on Metal for some tens of rows, in one launch.

A threadgroup computes 32 outputs of one matrix for a group of rows. It first finds the statistics of
the rows, then computes the activations of a slab of inputs at a time into threadgroup memory, where
its SIMD groups multiply them. Each packed word is read once for a group of rows. Each threadgroup reads
`x` and the norms twice, once for the statistics and once for the activations.
"""

from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.metal_functions import QUANTIZE, TERNARY
from .metal_form import GATES, Form, epsilons
from .metal_texts import (
    GATED,
    MAX_MATRICES,
    all_outputs,
    choice_of_matrix,
    input_of_row,
    scale_of_output,
    weight_of_own_norm,
)

SIMD_GROUPS = 8
OUTPUTS_PER_GROUP = 4
OUTPUTS = SIMD_GROUPS * OUTPUTS_PER_GROUP
"""Outputs of a threadgroup."""

_HEADER = f"""
    {TERNARY}
    {GATED}
    {QUANTIZE}
    constant constexpr int SIMD_GROUPS = {SIMD_GROUPS};
    constant constexpr int OUTPUTS = {OUTPUTS_PER_GROUP};
"""

_SOURCE = """
    constexpr int THREADS = 32 * SIMD_GROUPS;
    // words of a row in threadgroup memory, where 4 inputs of all words make a line; lines are longer
    // by one, to spread over memory banks
    constexpr int SLAB = ROWS < 3 ? 128 / ROWS : 32;
    constexpr int LINE = SLAB + 1;
    typedef float4 Inputs;
    threadgroup Inputs slab[ROWS * 4 * LINE];
    threadgroup float statistics[ROWS * 3 * SIMD_GROUPS];

    const int rows = x_shape[0];
    const int width = x_shape[1];
    const int dims = GATE == 0 ? width : width / 2;
    const int words = weight0_shape[1];
    const int used_words = (dims + 15) / 16;
    const int index = thread_index_in_threadgroup;
    const int lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;

    <choice of the matrix>
    const int first = OUTPUTS * (SIMD_GROUPS * block + group);
    const int first_row = ROWS * threadgroup_position_in_grid.y;

    // places behind the last row or output compute what the last one does, and store nothing
    int input_line[ROWS];
    int word_line[OUTPUTS];
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        input_line[row] = min(first_row + row, rows - 1) * width;
    }
    #pragma clang loop unroll(full)
    for (int n = 0; n < OUTPUTS; n++) word_line[n] = min(n, outputs - 1 - first) * words;

    float factors[ROWS];  // of both norms
    float code_scales[ROWS];
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        factors[row] = 1;
        code_scales[row] = 1;
    }
    if (QUANTIZED || NORM || OWN_NORM) {
        float squares[ROWS];
        float normed_squares[ROWS];
        float largest[ROWS];
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) {
            squares[row] = 0;
            normed_squares[row] = 0;
            largest[row] = 0;
        }
        for (int k = index; k < dims; k += THREADS) {
            const float weight_of_norm = NORM ? static_cast<float>(norm[k]) : 1.0f;
            const float weight_of_own = OWN_NORM ? <own_norm[k]> : 1.0f;
            #pragma clang loop unroll(full)
            for (int row = 0; row < ROWS; row++) {
                const float value = <input k of a row>;
                const float normed = value * weight_of_norm;
                squares[row] += value * value;
                normed_squares[row] += normed * normed;
                largest[row] = max(largest[row], abs(normed * weight_of_own));
            }
        }
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) {
            squares[row] = simd_sum(squares[row]);
            normed_squares[row] = simd_sum(normed_squares[row]);
            largest[row] = simd_max(largest[row]);
            if (lane == 0) {
                statistics[(3 * row + 0) * SIMD_GROUPS + group] = squares[row];
                statistics[(3 * row + 1) * SIMD_GROUPS + group] = normed_squares[row];
                statistics[(3 * row + 2) * SIMD_GROUPS + group] = largest[row];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) {
            const threadgroup float* found = statistics + 3 * row * SIMD_GROUPS;
            const int other = lane % SIMD_GROUPS;
            const bool counts = lane < SIMD_GROUPS;
            squares[row] = simd_sum(counts ? found[other] : 0.0f);
            normed_squares[row] = simd_sum(counts ? found[SIMD_GROUPS + other] : 0.0f);
            largest[row] = simd_max(found[2 * SIMD_GROUPS + other]);
            const float size = static_cast<float>(dims);
            if (NORM) factors[row] = precise::rsqrt(squares[row] / size + epsilons[0]);
            if (OWN_NORM) {
                // where squares overflow, the factor is zero: the row becomes zero, not NaN
                const float square = factors[row] == 0.0f
                    ? 0.0f : factors[row] * factors[row] * normed_squares[row];
                factors[row] *= precise::rsqrt(square / size + epsilons[1]);
            }
            if (QUANTIZED) code_scales[row] = scale_of_codes(largest[row] * factors[row]);
        }
    }

    const device uint* first_line = weights + static_cast<size_t>(first) * words;
    threadgroup float* values = reinterpret_cast<threadgroup float*>(slab);
    float4 sums[ROWS];  // of 4 outputs
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) sums[row] = float4(0.0f);
    for (int start = 0; start < used_words; start += SLAB) {
        const int filled = min(SLAB, used_words - start);
        for (uint at = index; at < 16u * filled; at += THREADS) {
            const int k = 16 * start + at;
            const bool inside = k < dims;
            const float weight_of_norm = NORM && inside ? static_cast<float>(norm[k]) : 1.0f;
            const float weight_of_own = OWN_NORM && inside ? <own_norm[k]> : 1.0f;
            #pragma clang loop unroll(full)
            for (int row = 0; row < ROWS; row++) {
                float value = 0;
                if (inside) {
                    value = <input k of a row> * weight_of_norm;
                    value *= weight_of_own * factors[row];
                    if (QUANTIZED) value = code_of(value * code_scales[row], HALF_AWAY);
                }
                values[4 * ((4 * row + at % 16 / 4) * LINE + at / 16) + at % 4] = value;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // a SIMD group without outputs has only activations to compute
        for (int word = first < outputs ? lane : filled; word < filled; word += 32) {
            uint4 packed;
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) packed[n] = first_line[word_line[n] + start + word];
            #pragma clang loop unroll(full)
            for (int k = 0; k < 16; k += 4) {
                float4 trits[4];
                #pragma clang loop unroll(full)
                for (int n = 0; n < 4; n++) {
                    trits[n] = trits_at<float4>(under_exponent(packed, k - k % 8), (k + n) % 8);
                }
                #pragma clang loop unroll(full)
                for (int row = 0; row < ROWS; row++) {
                    const Inputs inputs = slab[(4 * row + k / 4) * LINE + word];
                    #pragma clang loop unroll(full)
                    for (int n = 0; n < 4; n++) {
                        sums[row] = fma(float4(inputs[n]), trits[n], sums[row]);
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            const float sum = simd_sum(sums[row][n]);
            if (lane == 0 && first_row + row < rows && first + n < outputs) {
                const int output = first + n;
                const size_t at =
                    static_cast<size_t>(first_row + row) * <all outputs> + before + output;
                float result = sum * (<scale of the output> / code_scales[row]);
                if (RESIDUAL) result += static_cast<float>(residual[at]);
                out[at] = static_cast<T>(result);
            }
        }
    }
"""


def _kernel(matrices: int) -> Any:
    """The kernel for a number of matrices. Each has inputs of its own, chosen by threadgroup."""
    source = _SOURCE.replace("<choice of the matrix>", choice_of_matrix(matrices, OUTPUTS, "int"))
    for name, text in {
        "<input k of a row>": input_of_row("input_line[row]"),
        "<own_norm[k]>": weight_of_own_norm(matrices),
        "<scale of the output>": scale_of_output(matrices),
        "<all outputs>": all_outputs(matrices),
    }.items():
        source = source.replace(name, text)
    # (rows, D) or (rows, 2D), (D,), (rows, N), (2,)
    input_names = ["x", "norm", "residual", "epsilons"]
    for n in range(matrices):
        input_names += [f"weight{n}", f"scale{n}", f"own_norm{n}"]  # (N_n, W), (1,) or (N_n,), (D,)
    return mx.fast.metal_kernel(
        name=f"bit_linear_{matrices}",
        input_names=input_names,
        output_names=["out"],  # (rows, N), the sum of all N_n
        header=_HEADER,
        source=source,
    )


_KERNELS = {matrices: _kernel(matrices) for matrices in range(1, MAX_MATRICES + 1)}


def in_groups(form: Form, *arrays: mx.array) -> mx.array:
    """The results for up to four matrices."""
    x, projections, norm, residual = form.nested(arrays)
    *leading, width = x.shape
    rows = x.size // width
    group_rows = launch.rows_of_a_group(rows)
    x = x.reshape(rows, width)
    outputs = [weight.shape[0] for weight, *_ in projections]
    # x stands in for what the kernel does not read
    inputs = [
        x,
        x if norm is None else norm,
        x if residual is None else residual.reshape(rows, sum(outputs)),
        epsilons(form.norm_eps, form.eps),
    ]
    for weight, scale, own_norm in projections:
        inputs += [weight, scale, x if own_norm is None else own_norm]
    threads = launch.SIMD_GROUP * SIMD_GROUPS
    blocks = sum(-(-count // OUTPUTS) for count in outputs)
    (result,) = launch.launch(
        _KERNELS[len(projections)],
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("ROWS", group_rows),
            ("GATE", GATES[form.gate]),
            ("NORM", norm is not None),
            ("OWN_NORM", form.eps is not None),
            ("QUANTIZED", form.quantize),
            ("HALF_AWAY", form.rounding == "half_away"),
            ("RESIDUAL", residual is not None),
        ],
        grid=(threads * blocks, -(-rows // group_rows), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, sum(outputs))],
        output_dtypes=[x.dtype],
    )
    return result.reshape(*leading, sum(outputs))
