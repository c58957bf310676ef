"""What the texts of the Metal kernels of attention in training are put together from.

A threadgroup owns 32 rows: queries, or keys with their values. It meets the others in tiles of 16 or 32
rows, which lie in threadgroup memory as float32. A SIMD group owns 8 of the rows and keeps them in
registers, as it does its sums. Scores pass through a strip of threadgroup memory, where four lanes share
a row, so that no text depends on which lane holds which number of a matrix.
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
    // a query sees the keys up to its own place and as many more
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

# rows of an array as floats, with zeros behind the last row and dim
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

# of the own rows and those of a tile
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
    """Whether a `query` sees a `key`, either of which may lie behind the last."""
    return _IS_SEEN[0] + (_IS_SEEN[1] if has_mask else "")


def load_own(rows: dict[str, str]) -> str:
    """Loads the 8 rows of a SIMD group into registers."""
    words = {"begin": "0", "every": "1", "rows": "8", "first": "own_first", "to": "own_rows"}
    return filled(_LOAD, **rows, **words) + _OWN


def load_tile(rows: dict[str, str], to: str, first: str, simd_groups: int) -> str:
    """Loads a tile of the rows from the `first` one by all SIMD groups of a threadgroup."""
    words = {"begin": "group", "every": str(simd_groups), "rows": "STEP", "first": first, "to": to}
    return filled(_LOAD, **rows, **words)
