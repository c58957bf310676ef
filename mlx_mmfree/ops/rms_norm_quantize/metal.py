"""`rms_norm_quantize` on Metal, in one launch with a threadgroup for each row."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.metal_functions import QUANTIZE
from ..backend.self_check import kernel_fault
from . import reference

MAX_THREADS = 512
INPUTS_PER_THREAD = 4

_kernel = mx.fast.metal_kernel(
    name="rms_norm_quantize",
    input_names=["x", "weight", "eps"],  # (rows, D), (D,) if WEIGHTED, ()
    output_names=["codes", "scale"],  # (rows, D), (rows, 1)
    header=QUANTIZE,
    source="""
    const uint dims = x_shape[1];
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint groups = simdgroups_per_threadgroup;
    const uint row = threadgroup_position_in_grid.x;
    const size_t start = static_cast<size_t>(row) * dims;
    threadgroup float group_squares[16];
    threadgroup float group_largest[16];

    const auto inputs = x + start;
    const auto row_codes = codes + start;
    float squares = 0;
    float largest = 0;
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) {
                float value = static_cast<float>((inputs + first)[k]);
                squares += value * value;
                if (WEIGHTED) value *= static_cast<float>((weight + first)[k]);
                largest = max(largest, abs(value));
            }
        }
    }
    squares = simd_sum(squares);
    largest = simd_max(largest);
    if (lane == 0) {
        group_squares[group] = squares;
        group_largest[group] = largest;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    squares = simd_sum(lane < groups ? group_squares[lane] : 0.0f);
    largest = simd_max(lane < groups ? group_largest[lane] : 0.0f);

    const float factor = NORM ? precise::rsqrt(squares / static_cast<float>(dims) + eps) : 1.0f;
    // the largest value passes over NaN
    const float row_scale = scale_of_codes(isnan(squares) ? squares : largest * factor);
    for (uint first = 4 * index; first < dims; first += 128 * groups) {
        float four[4];
        #pragma clang loop unroll(full)
        for (uint n = 0; n < 4; n++) {
            // behind the last input those of the last one
            const uint k = WHOLE_FOURS ? n : min(n, dims - 1 - first);
            float value = static_cast<float>((inputs + first)[k]) * factor;
            if (WEIGHTED) value *= static_cast<float>((weight + first)[k]);
            // the largest one becomes 127, so that none need be clipped
            four[n] = rounded(value * row_scale, HALF_AWAY);
        }
        #pragma clang loop unroll(full)
        for (uint k = 0; k < 4; k++) {
            if (WHOLE_FOURS || first + k < dims) (row_codes + first)[k] = four[k];
        }
    }
    if (index == 0) scale[row] = row_scale;
    """,
)


def unsupported(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> str | None:
    if reason := launch.not_floats(x, weight):
        return reason
    is_whole = x.shape[-1] % INPUTS_PER_THREAD == 0
    return kernel_fault(
        "rms_norm_quantize",
        lambda *arrays: _codes(eps, rounding, *arrays),
        lambda *arrays: _reference(eps, rounding, *arrays),
        lambda: _check_inputs(x.dtype, None if weight is None else weight.dtype, is_whole),
        x=x.dtype,
        norm=eps is not None,
        weight=None if weight is None else weight.dtype,
        rounding=rounding,
        is_whole=is_whole,
    )


def run(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    function = _differentiable(eps, rounding)
    codes, scale = function(x) if weight is None else function(x, weight)
    return codes, scale


def _check_inputs(
    dtype: mx.Dtype, weight_dtype: mx.Dtype | None, is_whole: bool
) -> tuple[mx.array, ...]:
    # with whole numbers up to 127 and no norm the scale is 1, so that ties stay ties
    dims = 132 if is_whole else 129
    x = (mx.arange(2 * dims) * 37 % 255 - 127).astype(mx.float32).reshape(2, dims)
    x[:, 2:4] = mx.array([0.5, -2.5])
    if weight_dtype is None:
        return (x.astype(dtype),)
    return x.astype(dtype), mx.full((dims,), 2.0, weight_dtype)


def _reference(
    eps: float | None, rounding: str, x: mx.array, weight: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    return reference.run(x, weight, eps=eps, rounding=rounding)


def _codes(
    eps: float | None, rounding: str, x: mx.array, weight: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    *leading, dims = x.shape
    rows = x.size // dims
    groups = -(-dims // (launch.SIMD_GROUP * INPUTS_PER_THREAD))
    threads = min(launch.SIMD_GROUP * groups, MAX_THREADS)
    codes, scale = launch.launch(
        _kernel,
        inputs=[
            x.reshape(rows, dims),
            mx.array([1.0]) if weight is None else weight,
            mx.array(eps or 0.0, mx.float32),
        ],
        template=[
            ("NORM", eps is not None),
            ("WEIGHTED", weight is not None),
            ("HALF_AWAY", rounding == "half_away"),
            ("WHOLE_FOURS", dims % INPUTS_PER_THREAD == 0),
        ],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, dims), (rows, 1)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return codes.reshape(x.shape), scale.reshape(*leading, 1)


@cache
def _differentiable(eps: float | None, rounding: str) -> Callable[..., Any]:
    return with_reference_gradient(
        lambda *arrays: _codes(eps, rounding, *arrays),
        lambda *arrays: _reference(eps, rounding, *arrays),
    )
