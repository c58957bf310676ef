"""The product of tiles of activations and packed trits, as text for Metal kernels.

A threadgroup computes a tile of 64 rows and 64 outputs, each of its 4 SIMD groups a quarter of it. 32
inputs at a time are laid out in threadgroup memory, the weights as trits; while they are multiplied, the
next 32 are on their way.
"""

THREADS = 128
TILE = 64
DEPTH = 32


def product_of_tiles(
    *, task: str, loaded: str, place: str, load: str, laid_out: str, finish: str, store: str
) -> str:
    """Returns the source of a kernel with a template parameter `TileType`, the type of both tiles.

    Args:
        task: Sets `rows`, `outputs`, `words`, `weights`, `first_row`, `first_output`, and the inputs
            from `start` to `stop` that are to be multiplied.
        loaded: The type in which a thread holds 4 inputs.
        place: Where the first 4 inputs of `row` stand that a thread loads, for the number `four` in a
            tile.
        load: Loads 4 inputs from `x_at[i]`, of which input `k` of the row is the first of a tile, into
            `inputs[i]`, and steps to the next tile.
        laid_out: What was loaded into `inputs[i]`, as four numbers of `TileType`.
        finish: Sets what the stores of an output share. The output may lie behind the last.
        store: Stores `sum` of a `row` and an `output`.
    """
    parts = {
        "task": task,
        "loaded": loaded,
        "place": place,
        "load": load,
        "laid out": laid_out,
        "finish": finish,
        "store": store,
    }
    source = _SOURCE
    for name, text in parts.items():
        source = source.replace(f"<{name}>", text.strip())
    return source


_SOURCE = """
    constexpr uint TILE = 64, DEPTH = 32;
    // lines of the tiles, in fours, are longer by one, to spread them over memory banks
    constexpr uint LINE = DEPTH / 4 + 1;
    typedef vec<TileType, 4> Four;
    threadgroup Four x_tile[TILE * LINE];
    threadgroup Four trits_tile[TILE * LINE];

    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    <task>

    // a thread loads 4 inputs of 4 rows and the 16 trits of a word; places behind the last row or
    // output hold what the last one does
    const uint four = index % 8;
    size_t x_at[4];
    #pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
        const uint row = min(first_row + index / 8 + 16 * i, rows - 1);
        x_at[i] = <place>;
    }
    size_t word_at = static_cast<size_t>(min(first_output + index / 2, outputs - 1)) * words
        + start / 16 + index % 2;
    <loaded> inputs[4];
    uint word = 0;

    const uint tile_row = 32 * (group / 2);
    const uint tile_output = 32 * (group % 2);
    const threadgroup TileType* left_tile =
        reinterpret_cast<const threadgroup TileType*>(x_tile + tile_row * LINE);
    const threadgroup TileType* right_tile =
        reinterpret_cast<const threadgroup TileType*>(trits_tile + tile_output * LINE);
    simdgroup_matrix<float, 8, 8> sums[4][4];
    #pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
        #pragma clang loop unroll(full)
        for (uint j = 0; j < 4; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    // each step loads from device memory what the next one multiplies
    for (uint k = start; k < stop + DEPTH; k += DEPTH) {
        if (k < stop) {
            #pragma clang loop unroll(full)
            for (uint i = 0; i < 4; i++) {
                <load>
            }
            word = weights[word_at];
            word_at += DEPTH / 16;
        }
        if (k > start) {
            #pragma clang loop unroll(full)
            for (uint at = 0; at < DEPTH; at += 8) {
                simdgroup_matrix<TileType, 8, 8> left[4];
                simdgroup_matrix<TileType, 8, 8> right[4];
                #pragma clang loop unroll(full)
                for (uint i = 0; i < 4; i++) {
                    simdgroup_load(left[i], left_tile + 32 * LINE * i + at, 4 * LINE);
                    simdgroup_load(right[i], right_tile + 32 * LINE * i + at, 4 * LINE, 0, true);
                }
                #pragma clang loop unroll(full)
                for (uint i = 0; i < 4; i++) {
                    #pragma clang loop unroll(full)
                    for (uint j = 0; j < 4; j++) {
                        simdgroup_multiply_accumulate(sums[i][j], left[i], right[j], sums[i][j]);
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (k < stop) {
            #pragma clang loop unroll(full)
            for (uint i = 0; i < 4; i++) {
                x_tile[(index / 8 + 16 * i) * LINE + four] = <laid out>;
            }
            #pragma clang loop unroll(full)
            for (uint place = 0; place < 16; place += 4) {
                const uint codes = under_exponent(word, place - place % 8);
                Four trits;
                #pragma clang loop unroll(full)
                for (uint n = 0; n < 4; n++) {
                    trits[n] = static_cast<TileType>(trits_at<float>(codes, place % 8 + n));
                }
                trits_tile[index / 2 * LINE + index % 2 * 4 + place / 4] = trits;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // 8 rows and 32 outputs at a time, in the memory of the first tile
    threadgroup float* strip = reinterpret_cast<threadgroup float*>(x_tile) + group * 8 * 32;
    const uint output = first_output + tile_output + lane;
    <finish>
    #pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
        #pragma clang loop unroll(full)
        for (uint j = 0; j < 4; j++) simdgroup_store(sums[i][j], strip + 8 * j, 32);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        #pragma clang loop unroll(full)
        for (uint r = 0; r < 8; r++) {
            const uint row = first_row + tile_row + 8 * i + r;
            const float sum = strip[r * 32 + lane];
            if (row < rows && output < outputs) {
                <store>
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
"""
