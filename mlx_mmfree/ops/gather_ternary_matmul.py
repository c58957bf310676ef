"""Product of each row of activations with one of several packed ternary matrices, as experts have.

On Metal there is a kernel for few rows, and MLX's for more. In the first, a SIMD group computes 4
outputs of a row from the words of the matrix that the row names, as the kernel of `ternary_matmul` does.
MLX's own takes launches for scales beside it, but shares words among rows that name one matrix, which
few rows seldom do. To it, packed words are affine 2-bit matrices with scale 1 and bias -1.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx

from .backend import launch, self_check
from .backend.cost import Call, Cost, Product, work
from .backend.dispatch import FLOATS, Backend, Example, Operation, native_kernel
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import PAIRS, TERNARY, keeps_half_denormals
from .backend.self_check import packed_pattern
from .ternary import CODES_PER_WORD, packed_width, unpack_ternary
from .ternary_matmul.definition import GROUP_SIZES, ones


def gather_ternary_matmul(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    r"""Multiplies each row by the packed ternary matrix that it names.

    .. math::
        y_r = x_r\,T_{i_r}^\top

    Of the matrices, a kernel reads only those that some row names. The gradient is by `x` alone.

    Source: mixtures of experts (Shazeer et al., arXiv 1701.06538), with the matrices of BitNet b1.58 (Ma
    et al., arXiv 2402.17764).

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Packed trits of `E` matrices, `uint32` of shape `(E, N, packed_width(D))`, see
            `ops.ternary`.
        indices: The matrix :math:`i_r` of each row, integers `(...)` in `[0, E)`. Results of rows with
            others are undefined.

    Returns:
        Sums as float32 of shape `(..., N)`.

    Raises:
        ValueError: The packed width does not belong to `D` inputs, a dtype is wrong, or there is not one
            index for each row.

    Example:
        >>> from mlx_mmfree.ops import pack_ternary
        >>> weight = mx.stack([pack_ternary(mx.eye(2)), pack_ternary(-mx.eye(2))])
        >>> gather_ternary_matmul(mx.array([[5.0, 7.0], [5.0, 7.0]]), weight, mx.array([0, 1])).tolist()
        [[5.0, 7.0], [-5.0, -7.0]]
    """
    if weight.dtype != mx.uint32 or weight.ndim != 3:
        raise ValueError(
            "[gather_ternary_matmul] 'weight' must be uint32 matrices (E, N, W) but got "
            f"{weight.dtype} with shape {weight.shape}."
        )
    if x.ndim < 1 or weight.shape[2] != packed_width(x.shape[-1]):
        raise ValueError(
            "[gather_ternary_matmul] 'weight' must have the words of the inputs of 'x' in a row but has "
            f"{weight.shape[2]} for shape {x.shape}."
        )
    if indices.shape != x.shape[:-1] or not mx.issubdtype(indices.dtype, mx.integer):
        raise ValueError(
            "[gather_ternary_matmul] 'indices' must have an integer for each row of 'x' but got "
            f"{indices.dtype} with shape {indices.shape} for shape {x.shape}."
        )
    if x.size == 0 or weight.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[1]))
    result: mx.array = _operation(x, weight, indices.astype(mx.uint32))
    return result


BLOCK_WEIGHTS = 2**22


def reference(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    """The definition: unpack the matrix of each row, then one float32 product. Some rows at a time."""
    dims, (_, outputs, words) = x.shape[-1], weight.shape
    rows, named = x.reshape(-1, dims).astype(mx.float32), indices.reshape(-1)
    step = max(BLOCK_WEIGHTS // (outputs * dims), 1)
    parts = []
    for start in range(0, len(rows), step):
        chosen = weight[named[start : start + step]]
        trits = unpack_ternary(chosen.reshape(-1, words), dims).reshape(len(chosen), outputs, dims)
        parts.append((trits @ rows[start : start + step, :, None])[..., 0])
    return mx.concatenate(parts).reshape(*x.shape[:-1], outputs)


def gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array | None, ...]:
    """The gradient of `x`."""
    x, weight, indices = inputs
    return _product(cotangents[0], weight, indices, False)[..., : x.shape[-1]], None, None


def mlx_product(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    """MLX's product, which reads the matrices that are named."""
    width = weight.shape[2] * CODES_PER_WORD
    padding = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    return _product(mx.pad(x.astype(mx.float32), padding), weight, indices, True)


def _product(x: mx.array, weight: mx.array, indices: mx.array, transpose: bool) -> mx.array:
    experts, outputs, words = weight.shape
    group_size = next(size for size in GROUP_SIZES if words * CODES_PER_WORD % size == 0)
    scales, biases = (
        array.reshape(experts, outputs, -1)
        for array in ones(experts * outputs, words * CODES_PER_WORD // group_size, mx.float32)
    )
    y = mx.gather_qmm(
        x.astype(mx.float32)[..., None, :],
        weight,
        scales,
        biases,
        rhs_indices=indices,
        transpose=transpose,
        group_size=group_size,
        bits=2,
    )
    return y[..., 0, :]


chunked = with_reference_gradient(mlx_product, reference, gradients)
"""MLX's own product, where the library's kernels cannot run."""


MOST_ROWS = 64
GROUPS, OUTPUTS = 2, 4

# Lane l reads words l, l + 32, ... of its outputs. With halves, inputs are multiplied by codes, which
# are trits plus 1, and the inputs themselves are taken off after each word. A lane for which a scaled
# input is infinite begins again with trits.
_metal_kernel = mx.fast.metal_kernel(
    name="gather_ternary_matmul",
    input_names=["x", "weight", "indices"],  # (rows, D), (E, N, W), (rows,)
    output_names=["out"],  # (rows, N)
    header=TERNARY + PAIRS,
    source="""
    constexpr int OUTPUTS = 4;
    const int dims = x_shape[1];
    const int outputs = weight_shape[1];
    const int words = weight_shape[2];
    const uint lane = thread_index_in_simdgroup;
    const uint row = threadgroup_position_in_grid.y;
    const int first = OUTPUTS * (threadgroup_position_in_grid.x * simdgroups_per_threadgroup
        + simdgroup_index_in_threadgroup);
    if (first >= outputs) return;

    // places behind the last output compute what the last one does, and store nothing
    const auto inputs = x + static_cast<size_t>(row) * dims;
    const auto weights = weight
        + (static_cast<size_t>(indices[row]) * outputs + first) * words;
    int word_line[OUTPUTS];
    float2 sums[OUTPUTS];  // of inputs in the low and in the high halves of words
    #pragma clang loop unroll(full)
    for (int n = 0; n < OUTPUTS; n++) {
        word_line[n] = min(n, outputs - 1 - first) * words;
        sums[n] = float2(0.0f);
    }
    for (int at = lane; 16 * at < dims; at += 32) {
        const int start = 16 * at;
        uint2 packed[OUTPUTS];
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            packed[n] = shifts_of<HALVES>(weights[word_line[n] + at]);
        }
        float2 total = float2(0.0f);
        #pragma clang loop unroll(full)
        for (int k = 0; k < 8; k++) {
            float2 pair;
            #pragma clang loop unroll(full)
            for (int half_word = 0; half_word < 2; half_word++) {
                const int place = k + 8 * half_word;
                pair[half_word] = WHOLE_WORDS || start + place < dims
                    ? static_cast<float>((inputs + start)[place]) : 0.0f;
            }
            const float2 scaled = HALVES ? pair * (16777216.0f * unit_of_code(k)) : pair;
            total += pair;
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                sums[n] = fma(scaled, pair_at<HALVES>(packed[n], k), sums[n]);
            }
        }
        if (HALVES) {
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) sums[n] -= total;
        }
    }
    // infinity, NaN, or an input of which 2^24 times as much is infinite, spoils all sums
    if (HALVES && !(abs(sums[0][0] + sums[0][1]) < INFINITY)) {
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) sums[n] = float2(0.0f);
        for (int k = 16 * lane; k < dims; k += k % 16 == 15 ? 512 - 15 : 1) {
            const float value = static_cast<float>(inputs[k]);
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                const uint code = weights[word_line[n] + k / 16] >> (2 * (k % 16)) & 3u;
                sums[n][0] = fma(value, static_cast<float>(code) - 1.0f, sums[n][0]);
            }
        }
    }
    #pragma clang loop unroll(full)
    for (int n = 0; n < OUTPUTS; n++) {
        const float sum = simd_sum(sums[n][0] + sums[n][1]);
        if (lane == 0 && first + n < outputs) {
            out[static_cast<size_t>(row) * outputs + first + n] = sum;
        }
    }
    """,
)


def unsupported(x: mx.array, weight: mx.array, indices: mx.array) -> str | None:
    if x.dtype not in FLOATS:
        return f"it takes float32, float16 or bfloat16 activations, not {x.dtype}"
    if indices.size > MOST_ROWS:
        return None
    dims = x.shape[-1]
    is_whole = dims % CODES_PER_WORD == 0
    return self_check.kernel_fault(
        "gather_ternary_matmul",
        _few,
        reference,
        lambda: _check_inputs(544 if is_whole else 520, x.dtype),
        is_whole=is_whole,
        are_halves=keeps_half_denormals(),
        x=x.dtype,
    )


def _check_inputs(dims: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    x = (mx.arange(3 * dims) * 37 % 255 - 127).reshape(3, dims).astype(dtype)
    weight = packed_pattern(10, packed_width(dims)).reshape(2, 5, -1)
    return x, weight, mx.array([1, 0, 1], mx.uint32)


def metal(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    result: mx.array = _function(indices.size > MOST_ROWS)(x, weight, indices)
    return result


@cache
def _function(are_many: bool) -> Any:
    return with_reference_gradient(mlx_product if are_many else _few, reference, gradients)


def _few(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    rows, outputs, dims = indices.size, weight.shape[1], x.shape[-1]
    threads = GROUPS * launch.SIMD_GROUP
    (result,) = launch.launch(
        _metal_kernel,
        inputs=[x.reshape(rows, dims), weight, indices.reshape(rows)],
        template=[
            ("WHOLE_WORDS", dims % CODES_PER_WORD == 0),
            ("HALVES", keeps_half_denormals()),
        ],
        grid=(-(-outputs // (GROUPS * OUTPUTS)) * threads, rows, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.float32],
    )
    return result.reshape(*x.shape[:-1], outputs)


def native(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    """C++, in which the rows of a matrix share one product."""
    sums: mx.array = _kernel()(x.astype(mx.float32), weight, indices)
    return sums


def _cost(call: Call) -> Cost:
    """Each row reads a matrix, which is most where rows are fewer than matrices."""
    x, weight, indices = call.inputs
    experts, outputs, _ = weight.shape
    dims, read = x.shape[-1], min(indices.size, experts)
    is_transposed = call.options[0]
    inputs, outputs = (call.options[1], dims) if is_transposed else (dims, outputs)
    own = work(add=indices.size * inputs * outputs)
    found = Product(inputs, outputs, indices.size, 1, (1,), True, own)
    return Cost(own, (found,), {1: weight.nbytes // experts * read})


def _examples() -> Iterator[Example]:
    for rows, dims, dtype in product((1, 2), (32, 4, 33), FLOATS):
        weight = mx.zeros((2, 3, packed_width(dims)), mx.uint32)
        yield Example((mx.zeros((rows, dims), dtype), weight, mx.zeros((rows,), mx.uint32)))


_kernel = native_kernel("gather_ternary_matmul")
_operation = Operation(
    "gather_ternary_matmul",
    _examples,
    costs={"GatherTernaryMatmul": _cost},
    metal=Backend(metal, unsupported),
    native=native,
    chunked=chunked,
    reference=reference,
)
