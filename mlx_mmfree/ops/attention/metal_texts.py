"""The texts of the Metal kernels of attention in training, forward and of the gradient.

What the texts of the Metal kernels of attention in training are put together from.

A threadgroup owns 32 rows: queries, or keys with their values. It meets the others in tiles of 16 or 32
rows, which lie in threadgroup memory as float32. A SIMD group owns 8 of the rows and keeps them in
registers, as it does its sums. Scores pass through a strip of threadgroup memory, where four lanes share
a row, so that no text depends on which lane holds which number of a matrix.

Of the gradient, two SIMD groups share 8 rows. One multiplies queries and keys, the other the gradient of
the result and the values. Each needs what the other finds, and both add up as much.
"""

ROWS = 32
"""The rows that a threadgroup owns."""

# Template parameters are `T`, the type of heads and results; `D`, the dims of a head in whole sixteens;
# and `CAUSAL`. Heads come as (B, heads, rows, D), results and their gradient as (B, L, H, V).
SIZES = """
    const int heads = queries_shape[1];
    const int length = queries_shape[2];
    const int dims = queries_shape[3];
    const int groups = keys_shape[1];
    const int count = keys_shape[2];
    const int value_dims = values_shape[3];
    const int shared_by = heads / groups;
    // a query sees the keys up to its own position and as many more
    const int ahead = count - length;
    const float scale = precise::rsqrt(static_cast<float>(dims));

    constexpr int STEP = D <= 64 ? 32 : 16;
    // lines are longer by four, to spread them over memory banks
    constexpr int LINE = D + 4;
    constexpr int STRIP = STEP + 4;
    constexpr int MATRICES = D / 8;
    const int lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;
    const int strip_row = lane / 4;
    const int strip_column = lane % 4;
    const int first = 32 * threadgroup_position_in_grid.x;
"""

OF_A_QUERY_HEAD = """
    const int batch = threadgroup_position_in_grid.y / heads;
    const int head = threadgroup_position_in_grid.y % heads;
    const size_t key_head = static_cast<size_t>(batch) * groups + head / shared_by;
    const size_t key_origin = key_head * count * dims;
    const size_t value_origin = key_head * count * value_dims;
    const size_t query_row = static_cast<size_t>(threadgroup_position_in_grid.y) * length;
    const size_t result_origin = (static_cast<size_t>(batch) * length * heads + head) * value_dims;
    // the keys that some query of the threadgroup sees
    const int seen = CAUSAL ? min(count, min(first + 32, length) + ahead) : count;
"""

MASK_SIZES = """
    const size_t mask_origin = mask_shape[0] == 1
        ? 0 : static_cast<size_t>(batch) * mask_shape[2] * mask_shape[3];
    const size_t mask_line = mask_shape[2] == 1 ? 0 : mask_shape[3];
    const size_t mask_step = mask_shape[3] == 1 ? 0 : 1;
"""

_IS_SEEN = (
    "query < length && key < count && (!CAUSAL || key <= query + ahead)",
    " && mask[mask_origin + query * mask_line + key * mask_step]",
)

# rows of an array as floats, with zeros after the last row and dim
_LOAD = """
        for (int row = <begin>; row < <rows>; row += <every>) {
            const bool is_row = <first> + row < <stop>;
            const size_t place = <origin> + static_cast<size_t>(<first> + row) * <distance>;
            for (int column = lane; column < D; column += 32) {
                <to>[row * LINE + column] = is_row && column < <columns>
                    ? <factor>static_cast<float>(<array>[place + column]) : 0.0f;
            }
        }
"""

_OWN = """
        simdgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (int m = 0; m < MATRICES; m++) simdgroup_load(own[m], own_rows + 8 * m, LINE);
"""

# of the own rows and a tile's rows
SCORES = """
        #pragma clang loop unroll(full)
        for (int at = 0; at < STEP; at += 8) {
            simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            #pragma clang loop unroll(full)
            for (int m = 0; m < MATRICES; m++) {
                simdgroup_matrix<float, 8, 8> other;
                simdgroup_load(other, <tile> + at * LINE + 8 * m, LINE, 0, true);
                simdgroup_multiply_accumulate(sum, own[m], other, sum);
            }
            simdgroup_store(sum, strip + at, STRIP);
        }
"""

# the products of the strip and the rows of a tile
ADD = """
        simdgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (int at = 0; at < STEP; at += 8) {
            simdgroup_matrix<float, 8, 8> weights;
            simdgroup_load(weights, strip + at, STRIP);
            #pragma clang loop unroll(full)
            for (int m = 0; m < SUMS; m++) {
                simdgroup_matrix<float, 8, 8> other;
                simdgroup_load(other, <tile> + at * LINE + 8 * <matrix>, LINE);
                simdgroup_multiply_accumulate(sums[m], weights, other, sums[m]);
            }
        }
"""

NO_SUMS = """
    simdgroup_matrix<float, 8, 8> own[MATRICES];
    simdgroup_matrix<float, 8, 8> sums[SUMS];
    #pragma clang loop unroll(full)
    for (int m = 0; m < SUMS; m++) sums[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
"""

STORE = """
        #pragma clang loop unroll(full)
        for (int m = 0; m < SUMS; m++) simdgroup_store(sums[m], own_rows + 8 * <matrix>, LINE);
"""

WRITE = """
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (int row = 0; row < 8 && own_first + row < <stop>; row++) {
            const size_t place = <origin> + static_cast<size_t>(own_first + row) * <distance>;
            for (int column = lane; column < <columns>; column += 32) {
                <array>[place + column] = static_cast<T>(<value>);
            }
        }
"""

BARRIER = "        threadgroup_barrier(mem_flags::mem_threadgroup);\n"


QUERIES = {
    "array": "queries",
    "origin": "query_row * dims",
    "distance": "dims",
    "stop": "length",
    "columns": "dims",
    "factor": "scale * ",
}
KEYS = {
    "array": "keys",
    "origin": "key_origin",
    "distance": "dims",
    "stop": "count",
    "columns": "dims",
    "factor": "",
}
VALUES = {
    **KEYS,
    "array": "values",
    "origin": "value_origin",
    "distance": "value_dims",
    "columns": "value_dims",
}
COTANGENT = {
    **VALUES,
    "array": "cotangent",
    "origin": "result_origin",
    "distance": "heads * value_dims",
    "stop": "length",
}


def filled(text: str, **words: str) -> str:
    """A text with each name in angle brackets replaced."""
    for name, value in words.items():
        text = text.replace(f"<{name}>", value)
    return text


def is_seen(has_mask: bool) -> str:
    """Returns whether a `query` sees a `key`, either of which may lie after the last."""
    return _IS_SEEN[0] + (_IS_SEEN[1] if has_mask else "")


def load_own(rows: dict[str, str]) -> str:
    """Loads the 8 rows of a SIMD group into registers."""
    words = {"begin": "0", "every": "1", "rows": "8", "first": "own_first", "to": "own_rows"}
    return filled(_LOAD, **rows, **words) + _OWN


def load_tile(rows: dict[str, str], to: str, first: str, simd_groups: int) -> str:
    """Loads a tile of the rows from the `first` one by all SIMD groups of a threadgroup."""
    words = {"begin": "group", "every": str(simd_groups), "rows": "STEP", "first": first, "to": to}
    return filled(_LOAD, **rows, **words)


FORWARD_GROUPS = 4
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
            load_tile(KEYS, "key_tile", "first_key", FORWARD_GROUPS),
            load_tile(VALUES, "value_tile", "first_key", FORWARD_GROUPS),
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


BACKWARD_GROUPS = 8
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
            <position>
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
            load_tile(QUERIES, "tiles", "first_query", BACKWARD_GROUPS),
            load_tile(COTANGENT, "(tiles + STEP * LINE)", "first_query", BACKWARD_GROUPS),
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
                position="const int query = first_query + at;",
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
            load_tile(KEYS, "tiles", "first_key", BACKWARD_GROUPS),
            load_tile(VALUES, "(tiles + STEP * LINE)", "first_key", BACKWARD_GROUPS),
            BARRIER,
            filled(SCORES, tile="tile"),
            BARRIER,
            filled(
                _WEIGHTS,
                position="const int key = first_key + at;",
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
