"""`ternary_matmul` on Metal: a kernel for some tens of rows, one for more, and MLX's own.

- `groups`: our kernel for groups of up to 5 rows, each of which reads the packed words again
- `tiles`: our kernel for tiles of 64 rows and 64 outputs
- `split`: the same for tiles of 32 rows and 32 outputs, each computed in parts of the inputs
- `mlx`: `mx.quantized_matmul`

Which of ours computes a product follows from counts of instructions:

- Groups of 4 or 5 rows take 1.7 to 2 slots of issue for a weight and row, see `ops/README.md`. Tiles
  compute 64 rows whatever their number, in some 84 slots a weight: 64 multiply-adds by matrices, their
  loads, and what decodes and lays out, see `tests/ops/test_machine_code.py`. They cross at 48 rows.
- Where tiles leave a part of a GPU idle, inputs are split. Where they fill it, that gains nothing, and
  decodes each word for 32 rows instead of 64.

Whether MLX's product is faster differs by machine and is timed, see `backend.choice`, but for up to 8
rows: there groups read each word once or twice, in one launch with all around the product. MLX's takes
launches for codes and scales beside its own, more instructions a weight and row, and reads a quarter
more, two floats for 128 weights. Before anything is timed, ours computes; only in GPUs with units for
matrices, of which MLX makes use, its product does for more rows than groups take.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..backend import choice, launch, self_check, stored_results
from ..backend.gradient import with_reference_gradient
from ..backend.metal_functions import PAIRS, TERNARY, keeps_half_denormals
from ..backend.self_check import packed_pattern
from ..ternary import packed_width
from .definition import gradients, is_exact, mlx_product, reference
from .metal_tiles import PARTS, UNDIVIDED, depth, grid, product_of_tiles, tile

GROUPS, TILES, SPLIT, MLX = "groups", "tiles", "split", "mlx"

FILLING_TILES = 128
"""How many tiles are taken to fill a GPU. They are 12 SIMD groups for each of 40 cores, or 6 for each of
80. A core computes 4 at a time, and others while these wait for memory."""

FEWEST_SPLIT_INPUTS = 512
"""The fewest inputs that are split: with 4 steps for each of 8 parts, adding these up takes little."""

MOST_TIMED_ROWS = 512
_MOST_IN_ONE_LAUNCH = 8
_FIRST_WITH_MATRIX_UNITS = 5


def own_way(rows: int, dims: int, outputs: int) -> str:
    """Which of our kernels computes a product, by counts."""
    if rows <= launch.FEW_ROWS:
        return GROUPS
    side = tile(UNDIVIDED)
    tiles = -(-rows // side) * -(-outputs // side)
    return SPLIT if tiles < FILLING_TILES and dims >= FEWEST_SPLIT_INPUTS else TILES


def way_of_product(
    operation: str,
    run: Callable[[str], mx.array],
    fault: Callable[[str], str | None],
    x: mx.array,
    shape: tuple[int, int, int],
    task: dict[str, Any],
    *,
    mlx_is_exact: bool,
    must_agree: bool,
) -> str:
    """The name of what computes a product.

    Args:
        operation: What is computed.
        run: Gives the results of a way for up to `MOST_TIMED_ROWS` rows.
        fault: Why the kernels of a way must not be used.
        x: What the results depend on.
        shape: Rows, inputs and outputs.
        task: What tells a class of tasks from others, beside the shape.
        mlx_is_exact: Whether MLX's product is as exact as ours.
        must_agree: Whether results of both are the same bits.
    """
    rows, dims, outputs = shape
    ours, forced = own_way(*shape), choice.forced()
    may_be_mlx = mlx_is_exact and rows > _MOST_IN_ONE_LAUNCH
    ways = (ours, MLX)
    if may_be_mlx and ours != GROUPS and _has_matrix_units():
        ways = (MLX, ours)
    if forced in choice.ON_METAL and (forced != MLX or mlx_is_exact):
        return str(forced)
    if forced is not None or not may_be_mlx or launch.is_recording():
        return ways[0]
    # sizes between powers of 2 share a choice
    classes = {
        "rows_below": min(1 << rows.bit_length(), MOST_TIMED_ROWS),
        "inputs_below": 1 << dims.bit_length(),
        "outputs_below": 1 << outputs.bit_length(),
        "ours": ours,
    }

    def sound_results(way: str) -> mx.array:
        if reason := fault(way):
            raise RuntimeError(reason)
        return run(way)

    chosen = choice.choose(operation, ways, sound_results, x, classes | task, must_agree=must_agree)
    # a stored choice may be one that does not run in this process
    return chosen if chosen == ways[0] or fault(chosen) is None else ways[0]


def _has_matrix_units() -> bool:
    family = re.search(r"\bM(\d+)", stored_results.device_name())
    return family is not None and int(family[1]) >= _FIRST_WITH_MATRIX_UNITS


CODES_PER_WORD = 16
DECODE_GROUPS = 2
DECODE_OUTPUTS = 4
_MOST_ROWS_OF_HALVES = 2

# The type in which a tile of activations keeps their exact values.
_TILE_TYPES = {
    mx.float32: mx.float32,
    mx.bfloat16: mx.float32,
    mx.float16: mx.float16,
    mx.int8: mx.float16,
}

# A SIMD group computes 4 outputs of a group of rows. Lane l reads words l, l + 32, ... of their
# weights, so that neighbouring lanes read neighbouring words. With halves, inputs are multiplied by
# codes, which are trits plus 1. The inputs themselves are taken off after each word, so that sums stay
# as small as with trits. A lane for which a scaled input is infinite begins again with trits.
_decode = mx.fast.metal_kernel(
    name="ternary_matmul_decode",
    input_names=["x", "weight"],  # (rows, D), (N, W)
    output_names=["out"],  # (rows, N)
    header=TERNARY + PAIRS,
    source="""
    constexpr int OUTPUTS = 4;
    const int rows = x_shape[0];
    const int dims = x_shape[1];
    const int outputs = weight_shape[0];
    const int words = weight_shape[1];
    const uint lane = thread_index_in_simdgroup;
    const int first_row = ROWS * threadgroup_position_in_grid.y;
    const int first = OUTPUTS * (threadgroup_position_in_grid.x * simdgroups_per_threadgroup
        + simdgroup_index_in_threadgroup);
    if (first >= outputs) return;

    // indices after the last row or output compute what the last one does, and store nothing
    const auto inputs = x + static_cast<size_t>(first_row) * dims;
    const auto weights = weight + static_cast<size_t>(first) * words;
    int input_line[ROWS];
    int word_line[OUTPUTS];
    float2 sums[ROWS][OUTPUTS];  // of inputs in the low and in the high halves of words
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        input_line[row] = min(row, rows - 1 - first_row) * dims;
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) sums[row][n] = float2(0.0f);
    }
    #pragma clang loop unroll(full)
    for (int n = 0; n < OUTPUTS; n++) word_line[n] = min(n, outputs - 1 - first) * words;

    for (int word = lane; 16 * word < dims; word += 32) {
        const int start = 16 * word;
        uint2 packed[OUTPUTS];
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            packed[n] = shifts_of<HALVES>(weights[word_line[n] + word]);
        }
        float2 totals[ROWS];
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) totals[row] = float2(0.0f);
        #pragma clang loop unroll(full)
        for (int k = 0; k < 8; k++) {
            float2 trits[OUTPUTS];
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) trits[n] = pair_at<HALVES>(packed[n], k);
            #pragma clang loop unroll(full)
            for (int row = 0; row < ROWS; row++) {
                float2 pair;
                #pragma clang loop unroll(full)
                for (int half_word = 0; half_word < 2; half_word++) {
                    const int place = k + 8 * half_word;
                    const bool inside = WHOLE_WORDS || start + place < dims;
                    pair[half_word] = inside
                        ? static_cast<float>((inputs + (input_line[row] + start))[place]) : 0.0f;
                }
                if (HALVES) {
                    totals[row] += pair;
                    pair *= 16777216.0f * unit_of_code(k);
                }
                #pragma clang loop unroll(full)
                for (int n = 0; n < OUTPUTS; n++) {
                    sums[row][n] = fma(pair, trits[n], sums[row][n]);
                }
            }
        }
        if (HALVES) {
            #pragma clang loop unroll(full)
            for (int row = 0; row < ROWS; row++) {
                #pragma clang loop unroll(full)
                for (int n = 0; n < OUTPUTS; n++) sums[row][n] -= totals[row];
            }
        }
    }
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        // infinity, NaN, or an input of which 2^24 times as much is infinite, spoils all sums
        if (HALVES && !(abs(sums[row][0][0] + sums[row][0][1]) < INFINITY)) {
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) sums[row][n] = float2(0.0f);
            for (int k = 16 * lane; k < dims; k += k % 16 == 15 ? 512 - 15 : 1) {
                const float value = static_cast<float>((inputs + input_line[row])[k]);
                #pragma clang loop unroll(full)
                for (int n = 0; n < OUTPUTS; n++) {
                    const uint code = weights[word_line[n] + k / 16] >> (2 * (k % 16)) & 3u;
                    sums[row][n][0] = fma(value, static_cast<float>(code) - 1.0f, sums[row][n][0]);
                }
            }
        }
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            const float sum = simd_sum(sums[row][n][0] + sums[row][n][1]);
            if (lane == 0 && first_row + row < rows && first + n < outputs) {
                out[static_cast<size_t>(first_row + row) * outputs + first + n] = sum;
            }
        }
    }
    """,
)

_prefill = mx.fast.metal_kernel(
    name="ternary_matmul_prefill",
    input_names=["x", "weight"],  # (rows, D), (N, W)
    output_names=["out"],  # (rows, N)
    header=TERNARY,
    source=product_of_tiles(
        task="""
    const uint rows = x_shape[0];
    const uint dims = x_shape[1];
    const uint outputs = weight_shape[0];
    const uint words = weight_shape[1];
    const auto weights = weight;  // of either address space
    const uint first_output = threadgroup_position_in_grid.x * TILE;
    const uint first_row = threadgroup_position_in_grid.y * TILE;
        """,
        loaded="Four",
        offset="static_cast<size_t>(row) * dims + first + 4 * four",
        load="""
                #pragma clang loop unroll(full)
                for (uint n = 0; n < 4; n++) {
                    inputs[i][n] = WHOLE_TILES || k + 4 * four + n < dims
                        ? static_cast<TileType>(static_cast<float>(x[x_at[i] + n]))
                        : static_cast<TileType>(0.0f);
                }
                x_at[i] += STEP;
        """,
        laid_out="inputs[i]",
        finish="",
        store="""
                out[static_cast<size_t>(row) * outputs + output] = sum;
        """,
    ),
)


def unsupported(x: mx.array, weight: mx.array, *, codes: bool) -> str | None:
    if x.dtype not in _TILE_TYPES:
        return f"it takes float32, float16, bfloat16 or int8 activations, not {x.dtype}"
    return _fault(_way(x, weight, codes), x, codes)


def metal(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    result: mx.array = _function(_way(x, weight, codes), codes)(x, weight)
    return result


def _way(x: mx.array, weight: mx.array, codes: bool) -> str:
    """The name of what computes the sums."""
    (outputs, _), dims = weight.shape, x.shape[-1]
    rows = x.size // dims

    def sums(name: str) -> mx.array:
        return _sums(x.reshape(rows, dims)[:MOST_TIMED_ROWS], weight, name, codes)

    return way_of_product(
        "ternary_matmul",
        sums,
        partial(_fault, x=x, codes=codes),
        x,
        (rows, dims, outputs),
        {"x": x.dtype, "codes": codes},
        mlx_is_exact=is_exact(x.dtype, dims, codes),
        must_agree=codes,
    )


def _fault(name: str, x: mx.array, codes: bool) -> str | None:
    """Why one of our kernels must not be used."""
    if name == MLX:
        return None
    dims = x.shape[-1]
    is_few = name == GROUPS
    parts = _parts(name, x.dtype, codes)
    is_whole = dims % (CODES_PER_WORD if is_few else depth(parts)) == 0
    rows = launch.rows_of_a_group(x.size // dims) if is_few else launch.FEW_ROWS + 1
    return self_check.kernel_fault(
        "ternary_matmul_decode" if is_few else "ternary_matmul_prefill",
        partial(_sums, name=name, codes=codes),
        _reference,
        # more words than lanes, and more than one step of each part
        lambda: _check_inputs(rows, 544 if is_whole else 520, x.dtype),
        rows=rows,
        is_whole=is_whole,
        parts=parts,
        are_halves=is_few and _takes_halves(rows),
        x=x.dtype,
        codes=codes,
    )


def _check_inputs(rows: int, dims: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    codes = (mx.arange(rows * dims) * 37 % 255 - 127).reshape(rows, dims)
    return codes.astype(dtype), packed_pattern(5, packed_width(dims))


def _reference(x: mx.array, weight: mx.array) -> mx.array:
    return reference(x, weight, codes=False)


def _sums(x: mx.array, weight: mx.array, name: str, codes: bool) -> mx.array:
    *leading, dims = x.shape
    if name == MLX:
        return mlx_product(x.astype(mx.float32), weight)
    rows = x.reshape(x.size // dims, dims)
    if name == GROUPS:
        sums = _in_groups(rows, weight)
    else:
        sums = _in_tiles(rows, weight, codes, _parts(name, x.dtype, codes))
    return sums.reshape(*leading, weight.shape[0])


def _tile_type(dtype: mx.Dtype, codes: bool) -> mx.Dtype:
    # codes are exact in half, whatever type holds them
    return mx.float16 if codes else _TILE_TYPES[dtype]


def _parts(name: str, dtype: mx.Dtype, codes: bool) -> int:
    return PARTS[_tile_type(dtype, codes)] if name == SPLIT else UNDIVIDED


def _takes_halves(rows: int) -> bool:
    """Returns whether codes are halves for a group of rows: more rows cost more than that saves."""
    return rows <= _MOST_ROWS_OF_HALVES and keeps_half_denormals()


def _in_groups(x: mx.array, weight: mx.array) -> mx.array:
    """Groups of rows, each of which reads the weights."""
    rows, dims = x.shape
    outputs = weight.shape[0]
    group_rows = launch.rows_of_a_group(rows)
    threads = DECODE_GROUPS * launch.SIMD_GROUP
    (result,) = launch.launch(
        _decode,
        inputs=[x, weight],
        template=[
            ("ROWS", group_rows),
            ("WHOLE_WORDS", dims % CODES_PER_WORD == 0),
            ("HALVES", _takes_halves(group_rows)),
        ],
        grid=(-(-outputs // (DECODE_GROUPS * DECODE_OUTPUTS)) * threads, -(-rows // group_rows), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.float32],
    )
    return result


def _in_tiles(x: mx.array, weight: mx.array, codes: bool, parts: int) -> mx.array:
    """Tiles of rows and outputs, multiplied by the units for small matrices."""
    (rows, dims), outputs = x.shape, weight.shape[0]
    (result,) = launch.launch(
        _prefill,
        inputs=[x, weight],
        template=[
            ("TileType", _tile_type(x.dtype, codes)),
            ("WHOLE_TILES", dims % depth(parts) == 0),
            ("PARTS", parts),
        ],
        **grid(rows, [outputs], parts),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.float32],
    )
    return result


@cache
def _function(name: str, codes: bool) -> Callable[..., Any]:
    sums = partial(_sums, name=name, codes=codes)
    return with_reference_gradient(sums, _reference, gradients)
