"""`bit_linear` on Metal for many rows, in two launches: codes, and their products with all matrices.

The products are those of tiles of rows and outputs. They are scaled, added to the residual and stored in
the dtype of `x` where they are summed. Where there are few tiles, the inputs can be split within a
threadgroup, but never between several: their parts could be scaled only in another launch, after one
that zeroes or gathers them.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.metal_functions import TERNARY
from ..ternary_matmul.metal_tiles import PARTS, UNDIVIDED, grid, product_of_tiles
from .metal_codes import codes_of
from .metal_form import Form
from .metal_texts import MAX_MATRICES, all_outputs, choice_of_matrix, scale_of_output

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
    const uint dims = 4 * code_words;  // behind the last input codes are zero
    const uint words = weight0_shape[1];
    const uint first_output = block * TILE;
    const uint first_row = threadgroup_position_in_grid.y * TILE;
    const size_t first_scale = OWN_NORM ? static_cast<size_t>(chosen) * rows : 0;
        """,
        loaded="uint",
        place="(first_scale + row) * code_words + first / 4 + four",
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


def in_tiles(form: Form, *arrays: mx.array) -> mx.array:
    """The results for up to four matrices."""
    return _in_tiles(UNDIVIDED, form, arrays)


def in_split_tiles(form: Form, *arrays: mx.array) -> mx.array:
    """The same, with inputs in parts."""
    return _in_tiles(PARTS[_TILE_TYPE], form, arrays)


def _in_tiles(parts: int, form: Form, arrays: Sequence[mx.array]) -> mx.array:
    x, projections, norm, residual = form.nested(arrays)
    *leading, width = x.shape
    rows = x.size // width
    own_norms = [projection.norm for projection in projections]
    codes, scales = codes_of(form, x.reshape(rows, width), norm, own_norms)
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
            ("OWN_NORM", form.eps is not None),
            ("RESIDUAL", residual is not None),
        ],
        **grid(rows, outputs, parts),
        output_shapes=[(rows, sum(outputs))],
        output_dtypes=[x.dtype],
    )
    return result.reshape(*leading, sum(outputs))
