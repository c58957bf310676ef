"""`bit_linear` on Metal for some tens of rows, in one launch.

A threadgroup computes some outputs of one matrix for a group of rows, see `metal_tuning`. It first finds
the statistics of the rows, then computes the activations of a slab of inputs at a time into threadgroup
memory, where its SIMD groups multiply them. Each packed word is read once for a group of rows. Each
threadgroup reads `x` and the norms twice, once for the statistics and once for the activations.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ..activations import Activation
from ..backend import launch
from ..backend.metal_functions import PAIRS, QUANTIZE, SIGMOID, TERNARY
from .definition import Variant
from .metal_tuning import Tuning, blocks, slab_words

GATES: dict[Activation | None, int] = {None: 0, "silu": 1, "relu2": 2, "relu": 3}
"""The gates that the kernels compute."""


@cache
def epsilons(norm_eps: float | None, eps: float | None) -> mx.array:
    return mx.array([norm_eps or 0.0, eps or 0.0])


MAX_MATRICES = 4
"""The most matrices of one launch."""

GATED = (
    SIGMOID
    + """
    // an input, or a gate and an input
    template <int GATE>
    inline float gated(float value, float up) {
        if (GATE == 0) return value;
        if (GATE == 1) return value * sigmoid(value) * up;
        // NaN is not less than zero, and stays
        const float positive = value < 0.0f ? 0.0f : value;
        return (GATE == 2 ? positive * positive : positive) * up;
    }
"""
)


def input_of_row(start: str) -> str:
    """Input `k` of `x`, counted from `start`, gated.

    Neighbours are loaded at once where a number `k` is known to the compiler.
    """
    up = f"GATE == 0 ? 0.0f : static_cast<float>((x + ({start} + dims))[k])"
    return f"gated<GATE>(static_cast<float>((x + ({start}))[k]), {up})"


def choice_of_matrix(
    matrices: int, outputs_of_block: int | str, integer: str, of_each: Sequence[str] = ()
) -> str:
    """Sets the matrix of a threadgroup, `chosen`, and the `block` of its outputs.

    A matrix has inputs of its own, named with its number. `outputs` and `weights` are the chosen one's,
    and `before` counts the outputs of the matrices before it. Numbers are of type `integer`, and
    `outputs_of_block` is a number or the name of one. Inputs `of_each` matrix must have one type; the
    chosen one's has the name without a number.
    """
    lines = [
        f"{integer} chosen = 0;",
        f"{integer} before = 0;",
        f"{integer} first_block = 0;",
        f"{integer} outputs = weight0_shape[0];",
        "const device uint* weights = weight0;  // (outputs, words)",
        *(f"auto {name} = {name}0;" for name in of_each),
    ]
    for n in range(1, matrices):
        outputs = f"static_cast<{integer}>(weight{n - 1}_shape[0])"
        blocks = f"({outputs} + {outputs_of_block} - 1) / {outputs_of_block}"
        earlier = f"end{n - 1} + " if n > 1 else ""
        # ends are the same for all threads, so that they are computed once
        lines += [
            f"const {integer} end{n} = {earlier}{blocks};",
            f"if (threadgroup_position_in_grid.x >= static_cast<uint>(end{n})) {{",
            f"    chosen = {n};",
            f"    before = {' + '.join(f'weight{k}_shape[0]' for k in range(n))};",
            f"    first_block = end{n};",
            f"    outputs = weight{n}_shape[0];",
            f"    weights = weight{n};",
            *(f"    {name} = {name}{n};" for name in of_each),
            "}",
        ]
    lines.append(f"const {integer} block = threadgroup_position_in_grid.x - first_block;")
    return "\n    ".join(lines)


def weight_of_own_norm(matrices: int) -> str:
    """Weight `k` of the norm of the chosen matrix."""
    return _chosen([f"own_norm{n}[k]" for n in range(matrices)])


def scale_of_output(matrices: int) -> str:
    """The scale of an `output` of the chosen matrix."""
    return _chosen([f"scale{n}[scale{n}_shape[0] == 1 ? 0 : output]" for n in range(matrices)])


def all_outputs(matrices: int) -> str:
    """How many outputs the matrices have together."""
    return f"({' + '.join(f'weight{n}_shape[0]' for n in range(matrices))})"


def _chosen(values: list[str]) -> str:
    chain = [f"chosen == {n} ? static_cast<float>({value})" for n, value in enumerate(values[:-1])]
    return f"({' : '.join([*chain, f'static_cast<float>({values[-1]})'])})"


_HEADER = f"""
    {TERNARY}
    {PAIRS}
    {GATED}
    {QUANTIZE}
    // activations in threadgroup memory; halves hold codes exactly, in units of codes too
    template <bool QUANTIZED> struct InputsOf {{ typedef float One; typedef float4 Four; }};
    template <> struct InputsOf<true> {{ typedef half One; typedef half4 Four; }};
"""

_SOURCE = """
    constexpr int THREADS = 32 * SIMD_GROUPS;
    // words of a row in threadgroup memory, where 4 inputs of all words make a line; lines are longer
    // by one, to spread over memory banks
    constexpr int LINE = SLAB + 1;
    typedef typename InputsOf<QUANTIZED>::One Input;
    typedef typename InputsOf<QUANTIZED>::Four Inputs;
    threadgroup Inputs slab[ROWS * 4 * LINE];
    threadgroup float statistics[ROWS * 3 * SIMD_GROUPS];

    const int rows = x_shape[0];
    const int width = x_shape[1];
    const int dims = GATE == 0 ? width : width / 2;
    const int words = weight0_shape[1];
    const int used_words = (dims + 15) / 16;
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;

    <choice of the matrix>
    const int own = OUTPUTS * (SIMD_GROUPS * block + group);
    // the last ones compute some outputs of those before them again, and store only their own
    const int first = min(own, outputs - OUTPUTS);
    const int first_row = ROWS * threadgroup_position_in_grid.y;

    // rows behind the last one compute what it does, and store nothing
    int input_line[ROWS];
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        input_line[row] = min(first_row + row, rows - 1) * width;
    }

    float factors[ROWS];  // of both norms, and of codes
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
        for (int start = 4 * index; start < dims; start += 4 * THREADS) {
            #pragma clang loop unroll(full)
            for (int k = 0; k < 4; k++) {
                const bool inside = WHOLE_WORDS || start + k < dims;
                const float weight_of_norm = NORM && inside ? <norm[k]> : 1.0f;
                const float weight_of_own = OWN_NORM && inside ? <own_norm[k]> : 1.0f;
                #pragma clang loop unroll(full)
                for (int row = 0; row < ROWS; row++) {
                    const float value = inside ? <input k of a row> : 0.0f;
                    const float normed = value * weight_of_norm;
                    if (NORM) squares[row] += value * value;
                    if (OWN_NORM) normed_squares[row] += normed * normed;
                    const float weighted = normed * weight_of_own;
                    // with its sign, which takes one instruction less than its size
                    if (QUANTIZED && abs(weighted) > abs(largest[row])) largest[row] = weighted;
                }
            }
        }
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) {
            threadgroup float* found = statistics + 3 * row * SIMD_GROUPS + group;
            if (NORM) squares[row] = simd_sum(squares[row]);
            if (OWN_NORM) normed_squares[row] = simd_sum(normed_squares[row]);
            if (QUANTIZED) largest[row] = simd_max(abs(largest[row]));
            if (lane == 0) {
                if (NORM) found[0] = squares[row];
                if (OWN_NORM) found[SIMD_GROUPS] = normed_squares[row];
                if (QUANTIZED) found[2 * SIMD_GROUPS] = largest[row];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) {
            const threadgroup float* found =
                statistics + 3 * row * SIMD_GROUPS + lane % SIMD_GROUPS;
            const bool counts = lane < SIMD_GROUPS;
            const float size = static_cast<float>(dims);
            if (NORM) {
                const float sum = simd_sum(counts ? found[0] : 0.0f);
                factors[row] = precise::rsqrt(sum / size + epsilons[0]);
            }
            if (OWN_NORM) {
                const float sum = simd_sum(counts ? found[SIMD_GROUPS] : 0.0f);
                // where squares overflow, the factor is zero: the row becomes zero, not NaN
                const float square =
                    factors[row] == 0.0f ? 0.0f : factors[row] * factors[row] * sum;
                factors[row] *= precise::rsqrt(square / size + epsilons[1]);
            }
            if (QUANTIZED) {
                code_scales[row] = scale_of_codes(simd_max(found[2 * SIMD_GROUPS]) * factors[row]);
                factors[row] *= code_scales[row];
            }
        }
    }

    float2 sums[ROWS][OUTPUTS];  // of inputs in the low and in the high halves of words
    float totals[ROWS];  // of the inputs that this thread lays out
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        totals[row] = 0;
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) sums[row][n] = float2(0.0f);
    }
    int first_word = 0;
    do {
        const int filled = min(SLAB, used_words - first_word);
        for (uint at = 4 * index; at < 16u * filled; at += 4 * THREADS) {
            const int start = 16 * first_word + at;
            Inputs inputs[ROWS];
            #pragma clang loop unroll(full)
            for (int k = 0; k < 4; k++) {
                const bool inside = WHOLE_WORDS || start + k < dims;
                const float weight_of_norm = NORM && inside ? <norm[k]> : 1.0f;
                const float weight_of_own = OWN_NORM && inside ? <own_norm[k]> : 1.0f;
                #pragma clang loop unroll(full)
                for (int row = 0; row < ROWS; row++) {
                    float value = 0;
                    if (inside) {
                        value = <input k of a row> * weight_of_norm;
                        value *= weight_of_own * factors[row];
                        // the largest one becomes 127, so that none need be clipped
                        if (QUANTIZED) value = rounded(value, HALF_AWAY);
                    }
                    if (HALVES) {
                        totals[row] += value;
                        // threads lay out the same four of each word's half every time
                        value *= index % 2 == 0 ? unit_of_code(k) : unit_of_code(4 + k);
                    }
                    inputs[row][k] = static_cast<Input>(value);
                }
            }
            #pragma clang loop unroll(full)
            for (int row = 0; row < ROWS; row++) {
                slab[(4 * row + at % 16 / 4) * LINE + at / 16] = inputs[row];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // a SIMD group without outputs has only activations to compute
        for (int word = own < outputs ? lane : filled; word < filled; word += 32) {
            uint2 packed[OUTPUTS];
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                packed[n] = shifts_of<HALVES>(weights[(first + n) * words + first_word + word]);
            }
            #pragma clang loop unroll(full)
            for (int four = 0; four < 2; four++) {
                float2 trits[4][OUTPUTS];
                #pragma clang loop unroll(full)
                for (int k = 0; k < 4; k++) {
                    #pragma clang loop unroll(full)
                    for (int n = 0; n < OUTPUTS; n++) {
                        trits[k][n] = pair_at<HALVES>(packed[n], 4 * four + k);
                    }
                }
                #pragma clang loop unroll(full)
                for (int row = 0; row < ROWS; row++) {
                    const Inputs low = slab[(4 * row + four) * LINE + word];
                    const Inputs high = slab[(4 * row + four + 2) * LINE + word];
                    #pragma clang loop unroll(full)
                    for (int k = 0; k < 4; k++) {
                        float2 inputs;
                        inputs[0] = static_cast<float>(low[k]);
                        inputs[1] = static_cast<float>(high[k]);
                        #pragma clang loop unroll(full)
                        for (int n = 0; n < OUTPUTS; n++) {
                            sums[row][n] = fma(inputs, trits[k][n], sums[row][n]);
                        }
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        first_word += SLAB;
    } while (first_word < used_words);
    if (HALVES) {
        // codes are trits plus 1: the sum of all inputs is too much
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) {
            const float total = simd_sum(totals[row]);
            if (lane == 0) statistics[row * SIMD_GROUPS + group] = total;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) {
            const float total = statistics[row * SIMD_GROUPS + lane % SIMD_GROUPS];
            totals[row] = lane < SIMD_GROUPS ? total : 0.0f;
        }
    }
    // each lane stores one of the results
    const int row = ROWS == 1 ? 0 : lane / OUTPUTS;
    const int place = lane - OUTPUTS * row;
    const int output = first + place;
    float result = 0;
    float code_scale = 1;
    #pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; r++) {
        if (row == r) code_scale = code_scales[r];
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            float sum = sums[r][n][0] + sums[r][n][1];
            if (HALVES) sum = fma(sum, 16777216.0f, -totals[r]);
            sum = simd_sum(sum);
            if (lane == OUTPUTS * r + n) result = sum;
        }
    }
    if (lane < ROWS * OUTPUTS && first_row + row < rows && output >= own) {
        const int at = (first_row + row) * <all outputs> + before + output;
        result *= <scale of the output> / code_scale;
        if (RESIDUAL) result += static_cast<float>(residual[at]);
        out[at] = static_cast<T>(result);
    }
"""


def _kernel(matrices: int) -> Any:
    """The kernel for a number of matrices. Each has inputs of its own, chosen by threadgroup."""
    choice = choice_of_matrix(matrices, "(OUTPUTS * SIMD_GROUPS)", "int", ["own_norm"])
    source = _SOURCE.replace("<choice of the matrix>", choice)
    for name, text in {
        "<input k of a row>": input_of_row("input_line[row] + start"),
        "<norm[k]>": "static_cast<float>((norm + start)[k])",
        "<own_norm[k]>": "static_cast<float>((own_norm + start)[k])",
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


def in_groups(variant: Variant, *arrays: mx.array, tuning: Tuning | None = None) -> mx.array:
    """The results for up to four matrices."""
    x, projections, norm, residual = variant.nested(arrays)
    *leading, width = x.shape
    rows = x.size // width
    x = x.reshape(rows, width)
    outputs = [weight.shape[0] for weight, *_ in projections]
    if tuning is None:
        tuning = Tuning.of(variant, rows, width if variant.gate is None else width // 2, outputs)
    # x stands in for what the kernel does not read
    inputs = [
        x,
        x if norm is None else norm,
        x if residual is None else residual.reshape(rows, sum(outputs)),
        epsilons(variant.norm_eps, variant.eps),
    ]
    for weight, scale, own_norm in projections:
        inputs += [weight, scale, x if own_norm is None else own_norm]
    threads = launch.SIMD_GROUP * tuning.simd_groups
    (result,) = launch.launch(
        _KERNELS[len(projections)],
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("ROWS", tuning.rows),
            ("SIMD_GROUPS", tuning.simd_groups),
            ("OUTPUTS", tuning.outputs),
            ("SLAB", slab_words(variant, tuning.rows)),
            ("HALVES", tuning.are_halves),
            ("WHOLE_WORDS", tuning.is_whole),
            ("GATE", GATES[variant.gate]),
            ("NORM", norm is not None),
            ("OWN_NORM", variant.eps is not None),
            ("QUANTIZED", variant.quantize),
            ("HALF_AWAY", variant.rounding == "half_away"),
            ("RESIDUAL", residual is not None),
        ],
        grid=(
            threads * blocks(outputs, tuning.simd_groups * tuning.outputs),
            -(-rows // tuning.rows),
            1,
        ),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, sum(outputs))],
        output_dtypes=[x.dtype],
    )
    return result.reshape(*leading, sum(outputs))
