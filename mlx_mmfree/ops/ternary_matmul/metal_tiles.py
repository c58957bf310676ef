"""The product of tiles of activations and packed trits, as text for Metal kernels.

A threadgroup computes a tile of the results. Some inputs at a time are laid out in threadgroup memory,
the weights as trits; while they are multiplied, the next are on their way. A SIMD group sums 32 rows and
32 outputs, and there are two ways to make a threadgroup of these:

- Undivided, 4 of them compute a tile of 64 rows and 64 outputs, 32 inputs at a time.
- Split, each of 4 or 8 computes the same 32 rows and 32 outputs for a part of the inputs, 16 at a time.
  It loads its own and waits for no other. At the end the parts are added up in threadgroup memory,
  always in the same order, so that there is no second launch and sums of floats do not vary.

The second gives 4 or 8 times as many SIMD groups, each with so much less to do, to a GPU of which few
tiles leave a part idle. For that it loads inputs and decodes weights twice as often. The parts take
turns, so that what a threadgroup reads at a time is contiguous, and none takes more than one step more
than another.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.launch import SIMD_GROUP

UNDIVIDED = 1

PARTS = {mx.float16: 8, mx.float32: 4}
"""The number of parts of split inputs, by the type of the tiles, which together take 20 KB of 32.

There is one for all shapes, as each is a text of its own to compile.
"""


def tile(parts: int) -> int:
    """The rows and the outputs of a tile, as many of each."""
    return 64 if parts == UNDIVIDED else 32


def depth(parts: int) -> int:
    """The inputs of a tile."""
    return 32 if parts == UNDIVIDED else 16


def grid(rows: int, outputs: Sequence[int], parts: int) -> dict[str, Any]:
    """The arguments of a launch for matrices with some outputs each."""
    side = tile(parts)
    threads = SIMD_GROUP * (4 if parts == UNDIVIDED else parts)
    blocks = sum(-(-count // side) for count in outputs)
    return {"grid": (blocks * threads, -(-rows // side), 1), "threadgroup": (threads, 1, 1)}


def product_of_tiles(
    *, task: str, loaded: str, offset: str, load: str, laid_out: str, finish: str, store: str
) -> str:
    """Returns the source of a kernel with two template parameters.

    `TileType` is the type of both tiles, and `PARTS` the number of parts of the inputs.

    Args:
        task: Sets `rows`, `dims`, `outputs`, `words`, `weights`, `first_row` and `first_output`.
        loaded: The type in which a thread holds 4 inputs.
        offset: Where the first 4 inputs of `row` stand that a thread loads, for the number `four` in a
            tile that begins at input `first`.
        load: Loads 4 inputs from `x_at[i]`, of which input `k` of the row is the first of a tile, into
            `inputs[i]`, and moves on by `STEP` inputs.
        laid_out: What was loaded into `inputs[i]`, as four numbers of `TileType`.
        finish: Sets what the stores of an output share. The output may lie past the last.
        store: Stores `sum` of a `row` and an `output`.
    """
    texts = {
        "task": task,
        "loaded": loaded,
        "offset": offset,
        "load": load,
        "laid out": laid_out,
        "finish": finish,
        "store": store,
    }
    source = _SOURCE
    for name, text in texts.items():
        source = source.replace(f"<{name}>", text.strip())
    return source


_SOURCE = """
    constexpr bool SPLIT = PARTS > 1;
    constexpr uint TILE = SPLIT ? 32 : 64, DEPTH = SPLIT ? 16 : 32;
    constexpr uint STEP = PARTS * DEPTH;
    // lines of the tiles, in fours, are longer by one, to spread them over memory banks
    constexpr uint LINE = DEPTH / 4 + 1;
    typedef vec<TileType, 4> Four;
    threadgroup Four x_tiles[PARTS * TILE * LINE];
    threadgroup Four trits_tiles[PARTS * TILE * LINE];

    const uint lane = thread_index_in_simdgroup;
    // of the threads that share a tile: one SIMD group of a part, or all
    const uint part = SPLIT ? simdgroup_index_in_threadgroup : 0;
    const uint group = SPLIT ? 0 : simdgroup_index_in_threadgroup;
    const uint index = SPLIT ? lane : thread_index_in_threadgroup;
    const uint first = part * DEPTH;
    threadgroup Four* x_tile = x_tiles + part * TILE * LINE;
    threadgroup Four* trits_tile = trits_tiles + part * TILE * LINE;
    <task>

    // a thread loads 4 inputs of 4 rows and the 16 trits of a word; indices after the last row or
    // output hold what the last one does
    const uint four = index % (DEPTH / 4);
    const uint tile_line = index / (DEPTH / 4);
    size_t x_at[4];
    #pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
        const uint row = min(first_row + tile_line + TILE / 4 * i, rows - 1);
        x_at[i] = <offset>;
    }
    const uint tile_word = index % (DEPTH / 16);
    const uint word_line = index / (DEPTH / 16);
    size_t word_at = static_cast<size_t>(min(first_output + word_line, outputs - 1)) * words
        + first / 16 + tile_word;
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
    for (uint k = first; k < dims + STEP; k += STEP) {
        if (k < dims) {
            #pragma clang loop unroll(full)
            for (uint i = 0; i < 4; i++) {
                <load>
            }
            word = weights[word_at];
            word_at += STEP / 16;
        }
        if (k > first) {
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
        if (SPLIT) {
            simdgroup_barrier(mem_flags::mem_threadgroup);
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (k < dims) {
            #pragma clang loop unroll(full)
            for (uint i = 0; i < 4; i++) {
                x_tile[(tile_line + TILE / 4 * i) * LINE + four] = <laid out>;
            }
            #pragma clang loop unroll(full)
            for (uint place = 0; place < 16; place += 4) {
                const uint codes = under_exponent(word, place - place % 8);
                Four trits;
                #pragma clang loop unroll(full)
                for (uint n = 0; n < 4; n++) {
                    trits[n] = static_cast<TileType>(trits_at<float>(codes, place % 8 + n));
                }
                trits_tile[word_line * LINE + tile_word * 4 + place / 4] = trits;
            }
        }
        if (SPLIT) {
            simdgroup_barrier(mem_flags::mem_threadgroup);
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    // 8 rows and 32 outputs at a time, in the memory of the first tiles; of the parts of a sum, each
    // SIMD group adds up sums of other rows
    constexpr uint PART = TILE * LINE * sizeof(Four) / sizeof(float);
    const threadgroup float* strips =
        reinterpret_cast<const threadgroup float*>(x_tiles) + group * 8 * 32;
    threadgroup float* strip = reinterpret_cast<threadgroup float*>(x_tile) + group * 8 * 32;
    const uint output = first_output + tile_output + lane;
    <finish>
    #pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
        #pragma clang loop unroll(full)
        for (uint j = 0; j < 4; j++) simdgroup_store(sums[i][j], strip + 8 * j, 32);
        if (SPLIT) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        } else {
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        #pragma clang loop unroll(full)
        for (uint n = 0; n < 8; n += PARTS) {
            const uint r = n + part;
            const uint row = first_row + tile_row + 8 * i + r;
            float sum = strips[r * 32 + lane];
            #pragma clang loop unroll(full)
            for (uint other = 1; other < PARTS; other++) sum += strips[other * PART + r * 32 + lane];
            if (row < rows && output < outputs) {
                <store>
            }
        }
        if (SPLIT) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        } else {
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
"""
