"""`linear_scan` on Metal, parallel over channels and, in long sequences, over chunks of steps.

A chunk of steps maps the state before it to the state after it by `s -> product * s + sum`. Every chunk
first finds its two numbers. Then it starts from the state to which the chunks before it lead. The last
bits of long sequences therefore depend on how they are cut into calls.
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.self_check import kernel_fault
from . import reference

CHUNK_STEPS = 64
MAX_CHUNKS = 16

# A SIMD group runs one chunk of 32 neighbouring channels.
_PLACE = """
    const int length = f_shape[1];
    const int dims = f_shape[2];
    const int lane = thread_index_in_simdgroup;
    const int chunk = simdgroup_index_in_threadgroup;
    const int chunks = simdgroups_per_threadgroup;
    const int channel = threadgroup_position_in_grid.x * 32 + lane;
    const int steps = (length + chunks - 1) / chunks;
    const int start = min(chunk * steps, length);
    const int stop = channel < dims ? min(start + steps, length) : start;
    const size_t row = static_cast<size_t>(threadgroup_position_in_grid.y) * dims + channel;
    // of this channel at step 0
    const size_t origin =
        static_cast<size_t>(threadgroup_position_in_grid.y) * length * dims + channel;
    threadgroup float products[16 * 32];
    threadgroup float sums[16 * 32];
    float product = 1;
    float sum = 0;
"""

_forward = mx.fast.metal_kernel(
    name="linear_scan_forward",
    input_names=["f", "i", "state"],  # (B, L, D), (B, L, D), (B, D)
    output_names=["states", "last"],  # (B, L, D), (B, D)
    source=_PLACE
    + """
    if (chunk + 1 < chunks) {
        for (int t = start; t < stop; t++) {
            const size_t at = origin + static_cast<size_t>(t) * dims;
            const float gate = static_cast<float>(f[at]);
            product *= gate;
            sum = gate * sum + static_cast<float>(i[at]);
        }
    }
    products[chunk * 32 + lane] = product;
    sums[chunk * 32 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float value = channel < dims ? state[row] : 0.0f;
    for (int c = 0; c < chunk; c++) value = products[c * 32 + lane] * value + sums[c * 32 + lane];
    for (int t = start; t < stop; t++) {
        const size_t at = origin + static_cast<size_t>(t) * dims;
        value = static_cast<float>(f[at]) * value + static_cast<float>(i[at]);
        states[at] = value;
    }
    if (channel < dims && chunk + 1 == chunks) last[row] = value;
    """,
)

# The same recurrence from the last step to the first. The gradient that reaches step t from the next
# step is `f_{t+1} (states_gradient_{t+1} + ...)`.
_backward = mx.fast.metal_kernel(
    name="linear_scan_backward",
    # (B, L, D), (B, D), (B, L, D), (B, L, D), (B, D)
    input_names=["f", "state", "states", "states_gradient", "last_gradient"],
    # (B, L, D), (B, L, D), (B, D)
    output_names=["f_gradient", "i_gradient", "state_gradient"],
    source=_PLACE
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


def _launch(kernel: Any, inputs: Sequence[mx.array], shapes: Sequence[tuple]) -> list[mx.array]:
    batch, length, dims = inputs[0].shape
    chunks = min(max(length // CHUNK_STEPS, 1), MAX_CHUNKS)
    threads = launch.SIMD_GROUP * chunks
    return launch.launch(
        kernel,
        inputs=inputs,
        grid=(-(-dims // launch.SIMD_GROUP) * threads, batch, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
    )


def _states(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    states, last = _launch(_forward, [f, i, state.astype(mx.float32)], [f.shape, state.shape])
    return states, last


def _gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, ...]:
    f, _, state = inputs
    gradients = _launch(
        _backward,
        [f, state.astype(mx.float32), outputs[0], *cotangents],
        [f.shape, f.shape, state.shape],
    )
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, inputs, strict=True))


_scan = with_reference_gradient(_states, reference.run, _gradients)
