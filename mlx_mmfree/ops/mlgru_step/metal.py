"""`mlgru_step` on Metal, in one launch for one step, with a threadgroup for each sequence.

The operations that it is made of compute longer inputs, and those in which samples start.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.metal_functions import SIGMOID, SUM_OF_THREADGROUP
from ..backend.self_check import kernel_fault
from . import Options, reference

MAX_THREADS = 512
CHANNELS_PER_THREAD = 2

_kernel = mx.fast.metal_kernel(
    name="mlgru_step",
    # (B, 3E), (B, E), (E,), (E,) if BOUNDED, (B, 1) if MASKED, ()
    input_names=["gates", "state", "weight", "lower_bound", "valid", "eps"],
    output_names=["out", "last"],  # (B, E), (B, E)
    header=SIGMOID + SUM_OF_THREADGROUP,
    source="""
    const uint dims = state_shape[1];
    const uint index = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint groups = simdgroups_per_threadgroup;
    const uint row = threadgroup_position_in_grid.x;
    const size_t start = static_cast<size_t>(row) * dims;
    const size_t inputs = 3 * start;
    const size_t forget = inputs + dims;
    const size_t output = forget + dims;
    threadgroup float group_squares[32];

    float squares = 0;
    for (uint k = index; k < dims; k += 32 * groups) {
        const float gate = static_cast<float>(gates[output + k]);
        squares += gate * gate;
    }
    squares = sum_of_threadgroup(squares, group_squares, lane, group, groups);
    const float factor = precise::rsqrt(squares / static_cast<float>(dims) + eps);
    const bool stays = MASKED && !static_cast<bool>(valid[row]);
    for (uint k = index; k < dims; k += 32 * groups) {
        float f = sigmoid(static_cast<float>(gates[forget + k]));
        if (BOUNDED) {
            const float bound = static_cast<float>(lower_bound[k]);
            f = bound + (1.0f - bound) * f;
        }
        const float value = static_cast<float>(gates[inputs + k]);
        const float old = static_cast<float>(state[start + k]);
        const float h = stays ? old : f * old + value * sigmoid(value) * (1.0f - f);
        const float normed = static_cast<float>(gates[output + k]) * factor
            * static_cast<float>(weight[k]);
        out[start + k] = static_cast<T>(normed * h * sigmoid(h));
        last[start + k] = h;
    }
    """,
)


class _Form(NamedTuple):
    """The arguments of a launch that are not arrays."""

    eps: float
    is_bounded: bool
    is_masked: bool

    def nested(self, arrays: Sequence[mx.array]) -> tuple[list[mx.array], Options]:
        """The arguments of a call, from its arrays."""
        first, rest = list(arrays[:3]), list(arrays[3:])
        lower_bound = rest.pop(0) if self.is_bounded else None
        valid = rest.pop(0) if self.is_masked else None
        return first, Options(self.eps, lower_bound, valid)


def unsupported(gates: mx.array, state: mx.array, weight: mx.array, options: Options) -> str | None:
    eps, lower_bound, valid, starts = options
    if reason := launch.not_floats(gates, state, weight, lower_bound):
        return reason
    if not _is_fused(gates, starts):
        return None
    form = _Form(eps, lower_bound is not None, valid is not None)
    dtypes: dict[str, Any] = {
        "gates": gates.dtype,
        "weight": weight.dtype,
        "lower_bound": None if lower_bound is None else lower_bound.dtype,
        "valid": None if valid is None else valid.dtype,
    }
    return kernel_fault(
        "mlgru_step",
        partial(_step, form),
        partial(_reference, form),
        partial(_check_inputs, **dtypes),
        **dtypes,
    )


def run(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    eps, lower_bound, valid, starts = options
    if not _is_fused(gates, starts):
        return reference.run(gates, state, weight, options)
    given = [array for array in (lower_bound, valid) if array is not None]
    function = _differentiable(_Form(eps, lower_bound is not None, valid is not None))
    y, last = function(gates, state, weight, *given)
    return y, last


def _is_fused(gates: mx.array, starts: mx.array | None) -> bool:
    return gates.shape[1] == 1 and starts is None


def _check_inputs(
    gates: mx.Dtype, weight: mx.Dtype, lower_bound: mx.Dtype | None, valid: mx.Dtype | None
) -> list[mx.array]:
    # more than one SIMD group
    pattern = mx.arange(3 * 3 * 97)
    values = ((pattern * 37 % 101) / 25.0 - 2.0).reshape(3, 1, -1)
    state = ((pattern[: 3 * 97] * 53 % 97) / 24.0 - 2.0).reshape(3, -1)
    inputs = [values.astype(gates), state, (pattern[:97] % 3 + 1.0).astype(weight)]
    if lower_bound is not None:
        inputs.append((pattern[:97] / 97.0).astype(lower_bound))
    if valid is not None:
        inputs.append((pattern[:3, None] != 1).astype(valid))
    return inputs


def _reference(form: _Form, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    (gates, state, weight), options = form.nested(arrays)
    return reference.run(gates, state, weight, options)


def _step(form: _Form, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    (gates, state, weight), options = form.nested(arrays)
    _, lower_bound, valid, _ = options
    batch, dims = state.shape
    groups = -(-dims // (launch.SIMD_GROUP * CHANNELS_PER_THREAD))
    threads = min(launch.SIMD_GROUP * groups, MAX_THREADS)
    y, last = launch.launch(
        _kernel,
        inputs=[
            gates.reshape(batch, 3 * dims),
            state,
            weight,
            # the state stands in for what the kernel does not read
            state if lower_bound is None else lower_bound,
            state if valid is None else valid,
            mx.array(form.eps, mx.float32),
        ],
        template=[("T", gates.dtype), ("BOUNDED", form.is_bounded), ("MASKED", form.is_masked)],
        grid=(threads * batch, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, dims), (batch, dims)],
        output_dtypes=[gates.dtype, mx.float32],
    )
    return y.reshape(batch, 1, dims), last


@cache
def _differentiable(form: _Form) -> Callable[..., Any]:
    return with_reference_gradient(partial(_step, form), partial(_reference, form))
