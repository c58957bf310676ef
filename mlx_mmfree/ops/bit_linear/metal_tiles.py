"""`bit_linear` on Metal for many rows, in two launches: codes, and their products with all matrices.

The products are computed in tiles of rows and outputs. They are scaled, added to the residual and
stored in the dtype of `x` where they are summed. Where there are few tiles, the inputs can be split
within a threadgroup, but never between several: their parts could be scaled only in another launch,
after one that zeroes or gathers them.

Of the codes, a threadgroup computes one row: its gate, its norms and its codes. Codes are 8-bit
integers, four to a word. In half they would be as exact, but the products, which read them once for each
64 outputs, would read twice as many bytes, to save some 40 instructions next to the 1,024 multiply-adds
of a thread.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.metal_functions import QUANTIZE, TERNARY
from ..ternary_matmul.metal_tiles import PARTS, UNDIVIDED, grid, product_of_tiles
from .definition import Variant
from .metal_groups import (
    GATED,
    GATES,
    MAX_MATRICES,
    all_outputs,
    choice_of_matrix,
    epsilons,
    input_of_row,
    scale_of_output,
    weight_of_own_norm,
)

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

_codes_kernel = mx.fast.metal_kernel(
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
    variant: Variant, x: mx.array, norm: mx.array | None, own_norms: Sequence[mx.array | None]
) -> tuple[mx.array, mx.array]:
    """One set of codes for each norm, or one for all projections if they have none.

    Args:
        variant: How codes are made.
        x: `(rows, D)`, or `(rows, 2D)` with a gate.
        norm: `(D,)`, or `None`.
        own_norms: One for each projection, `(D,)` or `None`.

    Returns:
        Words of four codes, `(sets, rows, codes_width(D))`, and float32 scales, `(sets, rows)`. Bytes 0,
        2, 1 and 3 of a word, from the lowest, hold codes 0 to 3, plus 128.
    """
    rows, width = x.shape
    dims = width if variant.gate is None else width // 2
    sets = 1 if variant.eps is None else len(own_norms)
    given = [x if array is None else array for array in own_norms]
    threads = min(-(-dims // (4 * launch.SIMD_GROUP)) * launch.SIMD_GROUP, MAX_THREADS)
    codes, scales = launch.launch(
        _codes_kernel,
        inputs=[
            x,
            # x stands in for what the kernel does not read
            x if norm is None else norm,
            epsilons(variant.norm_eps, variant.eps),
            *given,
            *[x] * (MAX_MATRICES - len(given)),
        ],
        template=[
            ("SETS", sets),
            ("GATE", GATES[variant.gate]),
            ("NORM", norm is not None),
            ("OWN_NORM", variant.eps is not None),
            ("HALF_AWAY", variant.rounding == "half_away"),
        ],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(sets, rows, codes_width(dims)), (sets, rows)],
        output_dtypes=[mx.uint32, mx.float32],
    )
    return codes, scales


# holds codes and trits exactly
_TILE_TYPE = mx.float16

_HEADER = f"""
    {TERNARY}
    // The codes of a word, whose bytes hold 128 more. Under the exponent of 2^10 the bits of a half
    // count ones.
    inline vec<half, 4> codes_in(uint word) {{
        const vec<half, 2> first = as_type<vec<half, 2>>((word & 0x00FF00FFu) | 0x64006400u);
        const vec<half, 2> second = as_type<vec<half, 2>>((word >> 8 & 0x00FF00FFu) | 0x64006400u);
        vec<half, 4> codes;
        #pragma clang loop unroll(full)
        for (uint n = 0; n < 4; n++) codes[n] = (n < 2 ? first[n % 2] : second[n % 2]) - half(1152.0f);
        return codes;
    }}
"""


def _kernel(matrices: int) -> Any:
    """The kernel for a number of matrices. Each has inputs of its own, chosen by threadgroup."""
    source = product_of_tiles(
        task=f"""
    {choice_of_matrix(matrices, "TILE", "uint")}
    const uint rows = codes_shape[1];
    const uint code_words = codes_shape[2];
    const uint dims = 4 * code_words;  // after the last input codes are zero
    const uint words = weight0_shape[1];
    const uint first_output = block * TILE;
    const uint first_row = threadgroup_position_in_grid.y * TILE;
    const size_t first_scale = OWN_NORM ? static_cast<size_t>(chosen) * rows : 0;
        """,
        loaded="uint",
        offset="(first_scale + row) * code_words + first / 4 + four",
        load="""
                inputs[i] = codes[x_at[i]];
                x_at[i] += STEP / 4;
        """,
        laid_out="codes_in(inputs[i])",
        finish=f"const float scale = output < outputs ? {scale_of_output(matrices)} : 0.0f;",
        store=f"""
                const size_t at = static_cast<size_t>(row) * {all_outputs(matrices)} + before + output;
                float result = sum * (scale / code_scales[first_scale + row]);
                if (RESIDUAL) result += static_cast<float>(residual[at]);
                out[at] = static_cast<T>(result);
        """,
    )
    # (sets, rows, codes_width(D)), (sets, rows), (rows, N)
    input_names = ["codes", "code_scales", "residual"]
    for n in range(matrices):
        input_names += [f"weight{n}", f"scale{n}"]  # (N_n, W), (1,) or (N_n,)
    return mx.fast.metal_kernel(
        name=f"bit_linear_tiles_{matrices}",
        input_names=input_names,
        output_names=["out"],  # (rows, N), the sum of all N_n
        header=_HEADER,
        source=source,
    )


_KERNELS = {matrices: _kernel(matrices) for matrices in range(1, MAX_MATRICES + 1)}


def in_tiles(variant: Variant, *arrays: mx.array) -> mx.array:
    """The results for up to four matrices."""
    return _in_tiles(UNDIVIDED, variant, arrays)


def in_split_tiles(variant: Variant, *arrays: mx.array) -> mx.array:
    """The same, with inputs in parts."""
    return _in_tiles(PARTS[_TILE_TYPE], variant, arrays)


def _in_tiles(parts: int, variant: Variant, arrays: Sequence[mx.array]) -> mx.array:
    x, projections, norm, residual = variant.nested(arrays)
    *leading, width = x.shape
    rows = x.size // width
    own_norms = [projection.norm for projection in projections]
    codes, scales = codes_of(variant, x.reshape(rows, width), norm, own_norms)
    outputs = [weight.shape[0] for weight, *_ in projections]
    # the codes stand in for what the kernel does not read
    inputs = [
        codes,
        scales,
        codes if residual is None else residual.reshape(rows, sum(outputs)),
    ]
    for weight, scale, _ in projections:
        inputs += [weight, scale]
    (result,) = launch.launch(
        _KERNELS[len(projections)],
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("TileType", _TILE_TYPE),
            ("PARTS", parts),
            ("OWN_NORM", variant.eps is not None),
            ("RESIDUAL", residual is not None),
        ],
        **grid(rows, outputs, parts),
        output_shapes=[(rows, sum(outputs))],
        output_dtypes=[x.dtype],
    )
    return result.reshape(*leading, sum(outputs))
