"""The texts of the Metal kernels of the gradient of attention.

Two SIMD groups share 8 rows. One multiplies queries and keys, the other the gradient of the result and
the values. Each needs what the other finds, and both add up as much.
"""

from .metal_tiles import (
    ADD,
    BARRIER,
    COTANGENT,
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

SIMD_GROUPS = 8
"""The SIMD groups of a threadgroup."""

SUM_ROWS = 8
"""The rows of which a threadgroup sums the products of a result and its gradient, a SIMD group each."""

ROW_SUMS = """
    const int length = result_shape[1];
    const int heads = result_shape[2];
    const int value_dims = result_shape[3];
    const int lane = thread_index_in_simdgroup;
    const int query = 8 * threadgroup_position_in_grid.x + simdgroup_index_in_threadgroup;
    const int batch = threadgroup_position_in_grid.y / heads;
    const int head = threadgroup_position_in_grid.y % heads;
    if (query >= length) return;
    const size_t place = ((static_cast<size_t>(batch) * length + query) * heads + head) * value_dims;
    float sum = 0.0f;
    for (int n = lane; n < value_dims; n += 32) {
        sum += static_cast<float>(result[place + n]) * static_cast<float>(cotangent[place + n]);
    }
    sum = simd_sum(sum);
    // a query that sees nothing has NaN as its result
    const size_t row = static_cast<size_t>(threadgroup_position_in_grid.y) * length + query;
    if (lane == 0) row_sums[row] = log_sums[row] == INFINITY ? 0.0f : sum;
"""

_PAIRS = """
    threadgroup float tiles[2 * STEP * LINE];
    threadgroup float strips[8 * 8 * STRIP];
    const int kind = group % 2;
    const int own_first = first + 8 * (group / 2);
    threadgroup float* own_rows = tiles + 8 * (group / 2) * LINE;
    threadgroup float* strip = strips + 8 * group * STRIP;
    threadgroup float* tile = tiles + kind * STEP * LINE;
    const threadgroup float* products = strips + 8 * (group - kind) * STRIP;
    const threadgroup float* slopes = products + 8 * STRIP;
"""

# both groups of a pair read before either of them writes
_WEIGHTS = """
        float found[STEP / 4];
        #pragma clang loop unroll(full)
        for (int n = 0; n < STEP / 4; n++) {
            const int at = strip_column + 4 * n;
            <place>
            const bool is_seen = <seen>;
            const float score = products[strip_row * STRIP + at];
            const float slope = slopes[strip_row * STRIP + at] - <row_sum>;
            const float weight = is_seen ? exp(score - <log_sum>) : 0.0f;
            found[n] = <found>;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (int n = 0; n < STEP / 4; n++) {
            strip[strip_row * STRIP + strip_column + 4 * n] = found[n];
        }
"""


def _phases(*texts: str) -> str:
    """Lets the two kinds of SIMD groups use the memory of the tiles in turn."""
    return "".join(
        f"    if (kind == {kind}) {{\n{text}    }}\n{BARRIER}" for kind, text in enumerate(texts)
    )


def key_gradient(has_mask: bool) -> str:
    """The gradients of keys and values, a threadgroup for some of them."""
    return "".join(
        [
            SIZES,
            """
    constexpr int SUMS = MATRICES;
    const int batch = threadgroup_position_in_grid.y / groups;
    const int key_head = threadgroup_position_in_grid.y % groups;
    const size_t key_row = static_cast<size_t>(threadgroup_position_in_grid.y) * count;
    const size_t key_origin = key_row * dims;
    const size_t value_origin = key_row * value_dims;
            """,
            MASK_SIZES if has_mask else "",
            _PAIRS,
            """
    threadgroup float row_values[2 * STEP];
    const int key = own_first + strip_row;
            """,
            NO_SUMS,
            _phases(load_own(KEYS), load_own(VALUES)),
            """
    // queries before see none of the keys
    const int first_seeing = CAUSAL ? max(first - ahead, 0) / STEP * STEP : 0;
    for (int head = key_head * shared_by; head < (key_head + 1) * shared_by; head++) {
        const size_t query_row = (static_cast<size_t>(batch) * heads + head) * length;
        const size_t result_origin =
            (static_cast<size_t>(batch) * length * heads + head) * value_dims;
        for (int first_query = first_seeing; first_query < length; first_query += STEP) {
            """,
            load_tile(QUERIES, "tiles", "first_query", SIMD_GROUPS),
            load_tile(COTANGENT, "(tiles + STEP * LINE)", "first_query", SIMD_GROUPS),
            """
        if (group == 0 && lane < STEP) {
            const bool is_row = first_query + lane < length;
            row_values[lane] = is_row ? log_sums[query_row + first_query + lane] : INFINITY;
            row_values[STEP + lane] = is_row ? row_sums[query_row + first_query + lane] : 0.0f;
        }
            """,
            BARRIER,
            filled(SCORES, tile="tile"),
            BARRIER,
            filled(
                _WEIGHTS,
                place="const int query = first_query + at;",
                seen=is_seen(has_mask),
                row_sum="row_values[STEP + at]",
                log_sum="row_values[at]",
                found="kind == 0 ? weight * slope : weight",
            ),
            filled(ADD, tile="tile", matrix="m"),
            BARRIER,
            "        }\n    }\n",
            _phases(
                *(
                    filled(STORE, matrix="m")
                    + filled(WRITE, **words, value="own_rows[row * LINE + column]")
                    for words in (
                        {**KEYS, "array": "key_gradient"},
                        {**VALUES, "array": "value_gradient"},
                    )
                )
            ),
        ]
    )


def query_gradient(has_mask: bool) -> str:
    """The gradient of queries. Each SIMD group of a pair adds up half of the dims."""
    matrix = "(kind * SUMS + m)"
    return "".join(
        [
            SIZES,
            OF_A_QUERY_HEAD,
            MASK_SIZES if has_mask else "",
            """
    constexpr int SUMS = MATRICES / 2;
            """,
            _PAIRS,
            """
    const int query = own_first + strip_row;
    const float own_log_sum = query < length ? log_sums[query_row + query] : INFINITY;
    const float own_row_sum = query < length ? row_sums[query_row + query] : 0.0f;
            """,
            NO_SUMS,
            _phases(load_own(QUERIES), load_own(COTANGENT)),
            "    for (int first_key = 0; first_key < seen; first_key += STEP) {\n",
            load_tile(KEYS, "tiles", "first_key", SIMD_GROUPS),
            load_tile(VALUES, "(tiles + STEP * LINE)", "first_key", SIMD_GROUPS),
            BARRIER,
            filled(SCORES, tile="tile"),
            BARRIER,
            filled(
                _WEIGHTS,
                place="const int key = first_key + at;",
                seen=is_seen(has_mask),
                row_sum="own_row_sum",
                log_sum="own_log_sum",
                found="weight * slope",
            ),
            filled(ADD, tile="tiles", matrix=matrix),
            BARRIER,
            "    }\n",
            filled(STORE, matrix=matrix),
            BARRIER,
            "    if (kind == 0) {\n",
            filled(
                WRITE,
                **{**QUERIES, "array": "query_gradient"},
                value="scale * own_rows[row * LINE + column]",
            ),
            "    }\n",
        ]
    )
