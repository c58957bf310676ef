"""Products of rows with one of several matrices each on Metal, for matrices of codes of 2 bits.

A SIMD group computes 8 outputs of one matrix for all rows that name it, two at a time. Rows that name
the same matrix follow one another. Packed words are read once, and kept in threadgroup memory for the
rows after the first two.
"""

from typing import Any

import mlx.core as mx

from . import launch
from .metal_functions import PAIRS, TERNARY, keeps_half_denormals

OUTPUTS = 8
_MOST_GROUPS = 2
_MEMORY = 2**15
MOST_WORDS = _MEMORY // (4 * OUTPUTS)
"""The widest row of a matrix."""
MANY_ROWS = 32
"""From so many rows for each matrix on, if they are sorted, MLX's product is taken."""

MOST_UNSORTED = 64
"""The most rows that are not sorted, each of which reads a matrix."""

# Lane l takes words l, l + 32, ... of its outputs. With halves, inputs are multiplied by inverse units
# of codes beforehand, and sums by 2^24 at the end.
_ROWS = """
        float2 sums[OUTPUTS][<rows>];
        float totals[<rows>] = {};
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            for (int r = 0; r < <rows>; r++) sums[n][r] = float2(0.0f);
        }
        for (int at = lane; at < words; at += 32) {
            float2 inputs[<rows>][8];
            float own[<rows>] = {};
            #pragma clang loop unroll(full)
            for (int r = 0; r < <rows>; r++) {
                const auto line = lines + ((row + r) * dims + 16 * at);
                #pragma clang loop unroll(full)
                for (int n = 0; n < 16; n++) {
                    const float value = WHOLE_WORDS || 16 * at + n < dims
                        ? static_cast<float>(line[n]) : 0.0f;
                    inputs[r][n % 8][n / 8] = HALVES ? value * unit_of_code(n % 8) : value;
                    own[r] += value;
                }
                totals[r] += own[r];
            }
            <scaled>
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                const uint2 packed = shifts_of<HALVES>(held[kept + n * WORDS + at]);
                float2 found[<rows>];
                #pragma clang loop unroll(full)
                for (int r = 0; r < <rows>; r++) found[r] = SCALED ? float2(0.0f) : sums[n][r];
                #pragma clang loop unroll(full)
                for (int k = 0; k < 8; k++) {
                    const float2 codes = pair_at<HALVES>(packed, k);
                    #pragma clang loop unroll(full)
                    for (int r = 0; r < <rows>; r++) found[r] = fma(inputs[r][k], codes, found[r]);
                }
                #pragma clang loop unroll(full)
                for (int r = 0; r < <rows>; r++) <finished>
            }
        }
        // lane n stores output n
        #pragma clang loop unroll(full)
        for (int r = 0; r < <rows>; r++) {
            const float total = !SCALED && HALVES ? simd_sum(totals[r]) : 0.0f;
            float stored = 0.0f;
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                const float sum = simd_sum(SCALED ? sums[n][r][0] : sums[n][r][0] + sums[n][r][1]);
                stored = lane == n ? sum : stored;
            }
            if (lane < OUTPUTS && (WHOLE_OUTPUTS || first + lane < outputs)) {
                outs[(row + r) * outputs + lane] =
                    HALVES && !SCALED ? 16777216.0f * stored - total : stored;
            }
        }
"""

_TEXT = """
    constexpr int OUTPUTS = 8;
    const int dims = x_shape[1];
    const int outputs = weight_shape[1];
    const int words = weight_shape[2];
    const int lane = thread_index_in_simdgroup;
    const int place = threadgroup_position_in_grid.y;
    const int group = simdgroup_index_in_threadgroup;
    const int first = OUTPUTS * (threadgroup_position_in_grid.x * GROUPS + group);
    const int matrix = SORTED ? place : named[place];
    const int start = SORTED ? named[place] : place;
    const int rows = SORTED ? named[place + 1] - start : 1;
    if (first >= outputs || rows == 0) return;

    // outputs after the last one compute what the last one does, and store nothing
    const size_t line = static_cast<size_t>(matrix) * outputs + first;
    const auto weights = weight + line * words;
    threadgroup uint held[GROUPS * OUTPUTS * WORDS];
    const int kept = group * OUTPUTS * WORDS;
    <lines>
    // a lane reads back what it has written itself
    for (int at = lane; at < words; at += 32) {
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            const int from = WHOLE_OUTPUTS ? n : min(n, outputs - 1 - first);
            held[kept + n * WORDS + at] = weights[from * words + at];
        }
    }
    const auto lines = x + static_cast<size_t>(start) * dims;
    const auto outs = out + static_cast<size_t>(start) * outputs + first;
    int row = 0;
    for (; row + 1 < rows; row += 2) {<two>}
    if (row < rows) {<one>}
"""

# a scale and a bias belong to a group of inputs
_SCALED = """
            float whole[OUTPUTS];
            float bias[OUTPUTS];
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                const int from = WHOLE_OUTPUTS ? n : min(n, outputs - 1 - first);
                const int of_group = from * groups + 16 * at / GROUP_SIZE;
                const float scale = static_cast<float>(scale_line[of_group]);
                whole[n] = HALVES ? 16777216.0f * scale : scale;
                bias[n] = static_cast<float>(bias_line[of_group]) + (HALVES ? 0.0f : scale);
            }
"""
_FINISHED = """{
                    sums[n][r][0] = fma(whole[n], found[r][0] + found[r][1], sums[n][r][0]);
                    sums[n][r][0] = fma(bias[n], own[r], sums[n][r][0]);
                }"""
_LINES = """
    const int groups = scales_shape[2];
    const auto scale_line = scales + line * groups;
    const auto bias_line = biases + line * groups;
"""


def _kernel(is_scaled: bool) -> Any:
    body = _ROWS.replace("<scaled>", _SCALED if is_scaled else "")
    body = body.replace("<finished>", _FINISHED if is_scaled else "sums[n][r] = found[r];")
    text = _TEXT.replace("<lines>", _LINES if is_scaled else "")
    text = text.replace("<two>", body.replace("<rows>", "2"))
    return mx.fast.metal_kernel(
        name="gather_affine_matmul" if is_scaled else "gather_ternary_matmul",
        # (rows, D), (E, N, W), (E + 1,) or (rows,), (E, N, D / group) twice
        input_names=["x", "weight", "named", *(["scales", "biases"] if is_scaled else [])],
        output_names=["out"],  # (rows, N)
        header=TERNARY + PAIRS,
        source=text.replace("<one>", body.replace("<rows>", "1")),
    )


_kernels = {is_scaled: _kernel(is_scaled) for is_scaled in (False, True)}


def suits(x: mx.array, weight: mx.array, starts: mx.array | None) -> bool:
    """Returns whether the kernel is taken: a row of words fits, and rows are not too many."""
    rows = x.size // x.shape[-1]
    most = MOST_UNSORTED if starts is None else MANY_ROWS * weight.shape[0] - 1
    return weight.shape[2] <= MOST_WORDS and rows <= most


def variant(x: mx.array, weight: mx.array, starts: mx.array | None) -> dict[str, Any]:
    """The arguments that select the code that is compiled, beside dtypes."""
    words = weight.shape[2]
    return {
        "words": words,
        "is_whole": 16 * words == x.shape[-1],
        "is_filled": weight.shape[1] % OUTPUTS == 0,
        "is_sorted": starts is not None,
    }


def multiply(
    x: mx.array,
    weight: mx.array,
    indices: mx.array,
    starts: mx.array | None = None,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
) -> mx.array:
    """Products in one launch, float32 `(..., N)`.

    Args:
        x: `(..., D)`.
        weight: Packed trits, or codes of 2 bits, `(E, N, W)`, up to `MOST_WORDS` words wide.
        indices: The matrix of each row, `(...)`.
        starts: Where rows are sorted by matrix: where the rows of each begin, and their number, `(E +
            1,)`.
        scales, biases: Those of codes, `(E, N, D / group_size)`. Without them, codes are trits plus 1.
    """
    dims, (count, outputs, words) = x.shape[-1], weight.shape
    rows = x.reshape(-1, dims)
    groups = min(_MOST_GROUPS, MOST_WORDS // words)
    given = [] if scales is None or biases is None else [scales, biases]
    group_size = dims // scales.shape[2] if scales is not None else 1
    threads = groups * launch.SIMD_GROUP
    named = indices.reshape(-1) if starts is None else starts
    (result,) = launch.launch(
        _kernels[bool(given)],
        inputs=[rows, weight, named, *given],
        template=[
            ("WORDS", words),
            ("GROUPS", groups),
            ("SORTED", starts is not None),
            ("WHOLE_WORDS", 16 * words == dims),
            ("WHOLE_OUTPUTS", outputs % OUTPUTS == 0),
            ("HALVES", keeps_half_denormals()),
            ("SCALED", bool(given)),
            ("GROUP_SIZE", group_size),
        ],
        grid=(
            -(-outputs // (groups * OUTPUTS)) * threads,
            len(rows) if starts is None else count,
            1,
        ),
        threadgroup=(threads, 1, 1),
        output_shapes=[(len(rows), outputs)],
        output_dtypes=[mx.float32],
    )
    return result.reshape(*x.shape[:-1], outputs)
