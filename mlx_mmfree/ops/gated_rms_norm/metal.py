"""`gated_rms_norm` on Metal, in one launch with a threadgroup for each row."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.metal_functions import SIGMOID, SUM_OF_THREADGROUP
from ..backend.self_check import kernel_fault
from . import reference

MAX_THREADS = 512
INPUTS_PER_THREAD = 4

_kernel = mx.fast.metal_kernel(
    name="gated_rms_norm",
    # (rows, D), or (rows, more) of which the last D count, (rows, D), (D,), ()
    input_names=["gate", "h", "weight", "eps"],
    output_names=["out"],  # (rows, D)
    header=SIGMOID + SUM_OF_THREADGROUP,
    source="""
    const uint dims = h_shape[1];
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint groups = simdgroups_per_threadgroup;
    const size_t row = threadgroup_position_in_grid.x;
    const size_t start = row * dims;
    const size_t gate_start = (row + 1) * gate_shape[1] - dims;
    threadgroup float group_squares[32];

    float squares = 0;
    for (uint k = index; k < dims; k += 32 * groups) {
        const float value = static_cast<float>(gate[gate_start + k]);
        squares += value * value;
    }
    squares = sum_of_threadgroup(squares, group_squares, lane, group, groups);
    const float factor = precise::rsqrt(squares / static_cast<float>(dims) + eps);
    for (uint k = index; k < dims; k += 32 * groups) {
        const float normed = static_cast<float>(gate[gate_start + k]) * factor
            * static_cast<float>(weight[k]);
        const float value = static_cast<float>(h[start + k]);
        out[start + k] = static_cast<T>(normed * value * sigmoid(value));
    }
    """,
)


def unsupported(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> str | None:
    if reason := launch.not_floats(gate, h, weight):
        return reason
    dtypes = {"gate": gate.dtype, "h": h.dtype, "weight": weight.dtype}
    return kernel_fault(
        "gated_rms_norm",
        partial(gated, eps),
        partial(_reference, eps),
        partial(_check_inputs, **dtypes),
        **dtypes,
    )


def run(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    y: mx.array = _differentiable(eps)(gate, h, weight)
    return y


def _check_inputs(gate: mx.Dtype, h: mx.Dtype, weight: mx.Dtype) -> tuple[mx.array, ...]:
    # more than one SIMD group
    pattern = mx.arange(2 * 161).reshape(2, 161)
    gates = (pattern * 37 % 101) / 50.0 - 1.0
    values = (pattern * 53 % 97) / 24.0 - 2.0
    return gates.astype(gate), values.astype(h), (pattern[0] % 3 + 1.0).astype(weight)


def _reference(eps: float, *arrays: mx.array) -> mx.array:
    return reference.run(*arrays, eps=eps)


def gated(eps: float, gate: mx.array, h: mx.array, weight: mx.array) -> mx.array:
    """The results, `(..., D)`, for a gate that is the last `D` numbers of each row of `gate`."""
    *leading, dims = h.shape
    rows = h.size // dims
    groups = -(-dims // (launch.SIMD_GROUP * INPUTS_PER_THREAD))
    threads = min(launch.SIMD_GROUP * groups, MAX_THREADS)
    (y,) = launch.launch(
        _kernel,
        inputs=[gate.reshape(rows, -1), h.reshape(rows, dims), weight, mx.array(eps, mx.float32)],
        template=[("T", gate.dtype)],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, dims)],
        output_dtypes=[gate.dtype],
    )
    return y.reshape(*leading, dims)


@cache
def _differentiable(eps: float) -> Callable[..., Any]:
    return with_reference_gradient(partial(gated, eps), partial(_reference, eps))
