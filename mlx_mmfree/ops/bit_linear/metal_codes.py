"""The codes of many rows on Metal, which the kernel of `metal_tiles` multiplies.

A threadgroup computes one row: its gate, its norms and its codes. Codes are 8-bit integers, four to a
word. In half they would be as exact, but the products, which read them once for each 64 outputs, would
read twice as many bytes, to save some 40 instructions next to the 1,024 multiply-adds of a thread.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..backend import launch
from ..backend.metal_functions import QUANTIZE
from .metal_form import GATES, Form, epsilons
from .metal_texts import GATED, MAX_MATRICES, input_of_row, weight_of_own_norm

MAX_THREADS = 512

_SOURCE = """
    const uint rows = x_shape[0];
    const uint width = x_shape[1];
    const uint dims = GATE == 0 ? width : width / 2;
    const uint words = words_of_codes(dims);
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint groups = simdgroups_per_threadgroup;
    const uint row = threadgroup_position_in_grid.x;
    const size_t start = static_cast<size_t>(row) * width;
    threadgroup float statistics[(2 + SETS) * 16];

    float squares = 0;
    float normed_squares = 0;
    float largest[SETS];
    #pragma clang loop unroll(full)
    for (int chosen = 0; chosen < SETS; chosen++) largest[chosen] = 0;
    for (uint k = index; k < dims; k += 32 * groups) {
        const float value = <input k>;
        const float normed = NORM ? value * static_cast<float>(norm[k]) : value;
        squares += value * value;
        normed_squares += normed * normed;
        #pragma clang loop unroll(full)
        for (int chosen = 0; chosen < SETS; chosen++) {
            const float weighted = OWN_NORM ? normed * <own_norm[k]> : normed;
            // codes have no NaN: it spoils the scale, as infinity does
            const float size = isnan(weighted) ? INFINITY : abs(weighted);
            largest[chosen] = max(largest[chosen], size);
        }
    }
    squares = simd_sum(squares);
    normed_squares = simd_sum(normed_squares);
    if (lane == 0) {
        statistics[group] = squares;
        statistics[16 + group] = normed_squares;
    }
    #pragma clang loop unroll(full)
    for (int chosen = 0; chosen < SETS; chosen++) {
        largest[chosen] = simd_max(largest[chosen]);
        if (lane == 0) statistics[16 * (2 + chosen) + group] = largest[chosen];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    squares = simd_sum(lane < groups ? statistics[lane] : 0.0f);
    normed_squares = simd_sum(lane < groups ? statistics[16 + lane] : 0.0f);

    const float size = static_cast<float>(dims);
    float factor = 1;  // of both norms
    if (NORM) factor = precise::rsqrt(squares / size + epsilons[0]);
    if (OWN_NORM) {
        // where squares overflow, the factor is zero: the row becomes zero, not NaN
        const float square = factor == 0.0f ? 0.0f : factor * factor * normed_squares;
        factor *= precise::rsqrt(square / size + epsilons[1]);
    }
    float row_scales[SETS];
    #pragma clang loop unroll(full)
    for (int chosen = 0; chosen < SETS; chosen++) {
        largest[chosen] = simd_max(lane < groups ? statistics[16 * (2 + chosen) + lane] : 0.0f);
        row_scales[chosen] = scale_of_codes(largest[chosen] * factor);
        if (index == 0) scales[chosen * rows + row] = row_scales[chosen];
    }
    for (uint word = index; word < words; word += 32 * groups) {
        uint found[SETS];
        #pragma clang loop unroll(full)
        for (int chosen = 0; chosen < SETS; chosen++) found[chosen] = 0;
        #pragma clang loop unroll(full)
        for (uint n = 0; n < 4; n++) {
            const uint k = 4 * word + n;
            const bool inside = k < dims;
            float normed = inside ? <input k> : 0.0f;
            if (NORM && inside) normed *= static_cast<float>(norm[k]);
            #pragma clang loop unroll(full)
            for (int chosen = 0; chosen < SETS; chosen++) {
                float value = normed;
                value *= OWN_NORM && inside ? <own_norm[k]> * factor : factor;
                const float code = code_of(value * row_scales[chosen], HALF_AWAY);
                const uint byte = static_cast<uint>(isnan(code) ? 128.0f : code + 128.0f);
                found[chosen] |= byte << (16 * (n % 2) + 8 * (n / 2));
            }
        }
        #pragma clang loop unroll(full)
        for (int chosen = 0; chosen < SETS; chosen++) {
            codes[(static_cast<size_t>(chosen) * rows + row) * words + word] = found[chosen];
        }
    }
"""

_kernel = mx.fast.metal_kernel(
    name="bit_linear_codes",
    # (rows, D) or (rows, 2D), (D,), (2,), (D,) for each set
    input_names=["x", "norm", "epsilons", *(f"own_norm{n}" for n in range(MAX_MATRICES))],
    output_names=["codes", "scales"],  # (sets, rows, codes_width(D)), (sets, rows)
    header=GATED
    + QUANTIZE
    + """
    // words of a row of codes, which ends with zeros: 32 codes make a tile
    inline uint words_of_codes(uint dims) { return (dims + 31) / 32 * 8; }
""",
    source=_SOURCE.replace("<input k>", input_of_row("start")).replace(
        "<own_norm[k]>", weight_of_own_norm(MAX_MATRICES)
    ),
)


def codes_width(dims: int) -> int:
    """The number of words of codes in a row of `dims` inputs."""
    return -(-dims // 32) * 8


def codes_of(
    form: Form, x: mx.array, norm: mx.array | None, own_norms: Sequence[mx.array | None]
) -> tuple[mx.array, mx.array]:
    """One set of codes for each norm, or one for all projections if they have none.

    Args:
        form: How codes are made.
        x: `(rows, D)`, or `(rows, 2D)` with a gate.
        norm: `(D,)`, or `None`.
        own_norms: One for each projection, `(D,)` or `None`.

    Returns:
        Words of four codes, `(sets, rows, codes_width(D))`, and float32 scales, `(sets, rows)`. Bytes 0,
        2, 1 and 3 of a word, from the lowest, hold codes 0 to 3, plus 128.
    """
    rows, width = x.shape
    dims = width if form.gate is None else width // 2
    sets = 1 if form.eps is None else len(own_norms)
    given = [x if array is None else array for array in own_norms]
    threads = min(-(-dims // (4 * launch.SIMD_GROUP)) * launch.SIMD_GROUP, MAX_THREADS)
    codes, scales = launch.launch(
        _kernel,
        inputs=[
            x,
            # x stands in for what the kernel does not read
            x if norm is None else norm,
            epsilons(form.norm_eps, form.eps),
            *given,
            *[x] * (MAX_MATRICES - len(given)),
        ],
        template=[
            ("SETS", sets),
            ("GATE", GATES[form.gate]),
            ("NORM", norm is not None),
            ("OWN_NORM", form.eps is not None),
            ("HALF_AWAY", form.rounding == "half_away"),
        ],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(sets, rows, codes_width(dims)), (sets, rows)],
        output_dtypes=[mx.uint32, mx.float32],
    )
    return codes, scales
