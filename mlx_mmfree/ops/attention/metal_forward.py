"""The text of the Metal kernel of attention in training."""

from .metal_tiles import (
    ADD,
    BARRIER,
    KEYS,
    MASK_SIZES,
    NO_SUMS,
    OF_A_QUERY_HEAD,
    QUERIES,
    SCORES,
    SIZES,
    STORE,
    VALUES,
    WRITE,
    filled,
    is_seen,
    load_own,
    load_tile,
)

SIMD_GROUPS = 4
"""The SIMD groups of a threadgroup, each of which owns other rows."""

_SOFTMAX = """
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float scores[STEP / 4];
        float new_largest = largest;
        #pragma clang loop unroll(full)
        for (int n = 0; n < STEP / 4; n++) {
            const int key = first_key + strip_column + 4 * n;
            const bool is_seen = <seen>;
            scores[n] = is_seen ? strip[strip_row * STRIP + strip_column + 4 * n] : -INFINITY;
            new_largest = max(new_largest, scores[n]);
        }
        new_largest = max(new_largest, simd_shuffle_xor(new_largest, 1));
        new_largest = max(new_largest, simd_shuffle_xor(new_largest, 2));
        const float base = new_largest == -INFINITY ? 0.0f : new_largest;
        float sum = 0.0f;
        #pragma clang loop unroll(full)
        for (int n = 0; n < STEP / 4; n++) {
            const float weight = exp(scores[n] - base);
            strip[strip_row * STRIP + strip_column + 4 * n] = weight;
            sum += weight;
        }
        sum += simd_shuffle_xor(sum, 1);
        sum += simd_shuffle_xor(sum, 2);
        const float shrink = exp(largest - base);
        total = total * shrink + sum;
        largest = new_largest;
        // a diagonal matrix multiplies each row of the sums by its own number
        if (simd_max(shrink == 1.0f ? 0.0f : 1.0f) > 0.0f) {
            #pragma clang loop unroll(full)
            for (int n = 0; n < 2; n++) {
                const int column = 2 * strip_column + n;
                diagonal[strip_row * 8 + column] = column == strip_row ? shrink : 0.0f;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            simdgroup_matrix<float, 8, 8> factors;
            simdgroup_load(factors, diagonal, 8);
            const simdgroup_matrix<float, 8, 8> none =
                make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            #pragma clang loop unroll(full)
            for (int m = 0; m < SUMS; m++) {
                simdgroup_multiply_accumulate(sums[m], factors, sums[m], none);
            }
        }
"""


def forward(has_mask: bool, has_sinks: bool) -> str:
    """Results `(B, L, H, V)`, and the log of the sum of `e^score` of each query, `(B, H, L)`.

    The log is infinity where a query sees nothing, so that all its weights become 0.
    """
    start = "sinks[head]" if has_sinks else "-INFINITY"
    return "".join(
        [
            SIZES,
            OF_A_QUERY_HEAD,
            MASK_SIZES if has_mask else "",
            f"""
    constexpr int SUMS = MATRICES;
    threadgroup float tiles[2 * STEP * LINE];
    threadgroup float strips[4 * 8 * STRIP];
    threadgroup float diagonals[4 * 64];
    threadgroup float* key_tile = tiles;
    threadgroup float* value_tile = tiles + STEP * LINE;
    threadgroup float* own_rows = tiles + 8 * group * LINE;
    threadgroup float* strip = strips + 8 * group * STRIP;
    threadgroup float* diagonal = diagonals + 64 * group;
    const int own_first = first + 8 * group;
    const int query = own_first + strip_row;
    float largest = {start};
    float total = {"1.0f" if has_sinks else "0.0f"};
            """,
            NO_SUMS,
            load_own(QUERIES),
            "    for (int first_key = 0; first_key < seen; first_key += STEP) {\n",
            BARRIER,
            load_tile(KEYS, "key_tile", "first_key", SIMD_GROUPS),
            load_tile(VALUES, "value_tile", "first_key", SIMD_GROUPS),
            BARRIER,
            filled(SCORES, tile="key_tile"),
            filled(_SOFTMAX, seen=is_seen(has_mask)),
            filled(ADD, tile="value_tile", matrix="m"),
            "    }\n",
            """
    if (strip_column == 0 && query < length) {
        log_sums[query_row + query] = total == 0.0f ? INFINITY : largest + log(total);
    }
    if (strip_column == 0) diagonal[strip_row] = total;
            """,
            BARRIER,
            filled(STORE, matrix="m"),
            filled(
                WRITE,
                array="result",
                origin="result_origin",
                distance="heads * value_dims",
                stop="length",
                columns="value_dims",
                value="own_rows[row * LINE + column] / diagonal[row]",
            ),
        ]
    )
