"""`linear_scan` on Metal, and its gradient, in one launch each."""

import math
from collections.abc import Sequence

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.self_check import kernel_fault
from . import reference
from .metal_scan import CHUNK_STEPS, PLACE, forward_scan, launch_scan

_SHAPE = """
    const int length = f_shape[1];
    const int dims = f_shape[2];
"""

_forward = mx.fast.metal_kernel(
    name="linear_scan_forward",
    input_names=["f", "i", "state"],  # (B, L, D), (B, L, D), (B, D)
    output_names=["states", "last"],  # (B, L, D), (B, D)
    source=forward_scan(
        _SHAPE,
        """
            const float gate = static_cast<float>(f[at]);
            const float input = static_cast<float>(i[at]);
        """,
    ),
)

# The same recurrence from the last step to the first. The gradient that reaches step t from the next
# step is `f_{t+1} (states_gradient_{t+1} + ...)`.
_backward = mx.fast.metal_kernel(
    name="linear_scan_backward",
    # (B, L, D), (B, D), (B, L, D), (B, L, D), (B, D)
    input_names=["f", "state", "states", "states_gradient", "last_gradient"],
    # (B, L, D), (B, L, D), (B, D)
    output_names=["f_gradient", "i_gradient", "state_gradient"],
    source=_SHAPE
    + PLACE
    + """
    if (chunk > 0) {
        for (int t = stop - 1; t >= start; t--) {
            const size_t at = origin + static_cast<size_t>(t) * dims;
            const float gate = static_cast<float>(f[at]);
            product *= gate;
            sum = gate * (states_gradient[at] + sum);
        }
    }
    products[chunk * 32 + lane] = product;
    sums[chunk * 32 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float value = channel < dims ? last_gradient[row] : 0.0f;
    for (int c = chunks - 1; c > chunk; c--) {
        value = products[c * 32 + lane] * value + sums[c * 32 + lane];
    }
    for (int t = stop - 1; t >= start; t--) {
        const size_t at = origin + static_cast<size_t>(t) * dims;
        const float gradient = states_gradient[at] + value;
        i_gradient[at] = gradient;
        f_gradient[at] = gradient * (t > 0 ? states[at - dims] : state[row]);
        value = static_cast<float>(f[at]) * gradient;
    }
    if (channel < dims && chunk == 0) state_gradient[row] = value;
    """,
)


def unsupported(f: mx.array, i: mx.array, state: mx.array) -> str | None:
    if reason := launch.not_floats(f, i, state):
        return reason
    dtypes = {"f": f.dtype, "i": i.dtype}
    return kernel_fault(
        "linear_scan_forward",
        _states,
        reference.run,
        lambda: _check_inputs(**dtypes),
        **dtypes,
    ) or kernel_fault(
        "linear_scan_backward",
        lambda *inputs: mx.vjp(_scan, [*inputs], [*reference.run(*inputs)])[1],
        lambda *inputs: mx.vjp(reference.run, [*inputs], [*reference.run(*inputs)])[1],
        lambda: _check_inputs(**dtypes),
        **dtypes,
    )


def run(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    states, last = _scan(f, i, state)
    return states, last


def _check_inputs(f: mx.Dtype, i: mx.Dtype) -> tuple[mx.array, ...]:
    # two chunks, and more than one SIMD group of channels
    shape = (2, 2 * CHUNK_STEPS + 2, launch.SIMD_GROUP + 1)
    pattern = mx.arange(math.prod(shape)).reshape(shape)
    gates = (pattern * 37 % 101) / 101.0
    values = (pattern * 53 % 97) / 48.0 - 1.0
    return gates.astype(f), values.astype(i), values[:, 0] + 0.5


def _states(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    states, last = launch_scan(_forward, [f, i, state.astype(mx.float32)], [f.shape, state.shape])
    return states, last


def _gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, ...]:
    f, _, state = inputs
    gradients = launch_scan(
        _backward,
        [f, state.astype(mx.float32), outputs[0], *cotangents],
        [f.shape, f.shape, state.shape],
    )
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, inputs, strict=True))


_scan = with_reference_gradient(_states, reference.run, _gradients)
