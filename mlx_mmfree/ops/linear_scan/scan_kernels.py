"""`linear_scan` and its gradient in one launch each, whatever kind of GPU compiles the kernels."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..backend import launch
from ..backend.gradient import with_reference_gradient
from ..backend.self_check import kernel_fault
from . import reference
from .metal_scan import CHUNK_STEPS, PLACE, forward_scan, launch_scan, place_type

_SHAPE = """
    const int length = f_shape[1];
    const int dims = f_shape[2];
"""

FORWARD: dict[str, Any] = {
    "name": "linear_scan_forward",
    "input_names": ["f", "i", "state"],  # (B, L, D), (B, L, D), (B, D)
    "output_names": ["states", "last"],  # (B, L, D), (B, D)
    "source": forward_scan(
        _SHAPE,
        """
            const float gate = static_cast<float>(f[at]);
            const float input = static_cast<float>(i[at]);
        """,
    ),
}

# The same recurrence from the last step to the first. The gradient that reaches step t from the next
# step is `f_{t+1} (states_gradient_{t+1} + ...)`.
BACKWARD: dict[str, Any] = {
    "name": "linear_scan_backward",
    # (B, L, D), (B, D), (B, L, D), (B, L, D), (B, D)
    "input_names": ["f", "state", "states", "states_gradient", "last_gradient"],
    # (B, L, D), (B, L, D), (B, D)
    "output_names": ["f_gradient", "i_gradient", "state_gradient"],
    "source": _SHAPE
    + PLACE
    + """
    if (chunk > 0) {
        at = (first_step + stop) * dims + channel;
        for (int t = stop - 1; t >= start; t--) {
            at -= dims;
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
    at = (first_step + stop) * dims + channel;
    for (int t = stop - 1; t >= start; t--) {
        at -= dims;
        const float gradient = states_gradient[at] + value;
        i_gradient[at] = gradient;
        f_gradient[at] = gradient * (t > 0 ? states[at - dims] : state[row]);
        value = static_cast<float>(f[at]) * gradient;
    }
    if (channel < dims && chunk == 0) state_gradient[row] = value;
    """,
}


class ScanKernels:
    """The functions of a backend of `linear_scan`.

    Args:
        forward: What launches `FORWARD`, as `launch.launch` takes it.
        backward: What launches `BACKWARD`.
    """

    def __init__(self, forward: Any, backward: Any):
        self._forward, self._backward = forward, backward
        self._scan = with_reference_gradient(self._states, reference.run, self._gradients)

    def unsupported(self, f: mx.array, i: mx.array, state: mx.array) -> str | None:
        if reason := launch.not_floats(f, i, state):
            return reason
        dtypes = {"f": f.dtype, "i": i.dtype}
        place = place_type(f.shape)
        return kernel_fault(
            "linear_scan_forward",
            partial(self._states, place=place),
            reference.run,
            lambda: _check_inputs(**dtypes),
            **dtypes,
            place=place,
        ) or kernel_fault(
            "linear_scan_backward",
            partial(self._gradients_of_itself, place=place),
            lambda *inputs: mx.vjp(reference.run, [*inputs], [*reference.run(*inputs)])[1],
            lambda: _check_inputs(**dtypes),
            **dtypes,
            place=place,
        )

    def run(self, f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        states, last = self._scan(f, i, state)
        return states, last

    def _states(
        self, f: mx.array, i: mx.array, state: mx.array, place: mx.Dtype | None = None
    ) -> tuple[mx.array, mx.array]:
        inputs = [f, i, state.astype(mx.float32)]
        states, last = launch_scan(self._forward, inputs, [f.shape, state.shape], place)
        return states, last

    def _gradients(
        self,
        inputs: Sequence[mx.array],
        cotangents: Sequence[mx.array],
        outputs: Sequence[mx.array],
        place: mx.Dtype | None = None,
    ) -> tuple[mx.array, ...]:
        f, _, state = inputs
        gradients = launch_scan(
            self._backward,
            [f, state.astype(mx.float32), outputs[0], *cotangents],
            [f.shape, f.shape, state.shape],
            place,
        )
        return tuple(g.astype(x.dtype) for g, x in zip(gradients, inputs, strict=True))

    def _gradients_of_itself(self, *inputs: mx.array, place: mx.Dtype) -> tuple[mx.array, ...]:
        """The gradients where the results are their own cotangents."""
        results = reference.run(*inputs)
        return self._gradients(inputs, results, results, place)


def _check_inputs(f: mx.Dtype, i: mx.Dtype) -> tuple[mx.array, ...]:
    # two chunks, and more than one SIMD group of channels
    shape = (2, 2 * CHUNK_STEPS + 2, launch.SIMD_GROUP + 1)
    pattern = mx.arange(math.prod(shape)).reshape(shape)
    gates = (pattern * 37 % 101) / 101.0
    values = (pattern * 53 % 97) / 48.0 - 1.0
    return gates.astype(f), values.astype(i), values[:, 0] + 0.5
