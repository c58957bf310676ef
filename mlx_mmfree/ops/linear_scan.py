r"""The elementwise linear recurrence of HGRN and MLGRU.

In plain operations it is parallel over chunks of steps. Let `s` be the state before a chunk. Then
:math:`s_t = p_t\,s + c_t` for each step of the chunk, with the products :math:`p_t` of its gates and the
states :math:`c_t` that start from zero. All chunks compute these side by side. The states before the
chunks are a scan of their own, with one step for each chunk. Gates may be zero, because nothing is
divided and no logarithm is taken. The gradient is the same recurrence from the last step to the first,
so no slice has a gradient of its own.

On a GPU it is parallel over channels and, in long sequences, over chunks of steps. With a thread for
each channel alone, a batch of 4 rows of 1,024 channels would have 128 SIMD groups, which wait for memory
at each of their steps. Up to 16 chunks of a sequence let as many groups wait at once. That costs a
second read of the gates and inputs of all chunks but one. The last bits of long sequences therefore
depend on how they are cut into calls. CUDA's kernels are those for Metal in its own words. Each is
compared with the definition at its first use on a device, and does not run where it differs.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx

from .backend import launch, self_check
from .backend.cost import Call, Cost, work
from .backend.dispatch import FLOATS, Backend, Example, Operation, native_kernel, not_floats
from .backend.gradient import with_reference_gradient
from .backend.launch import CudaKernel
from .splitting import positions

CHUNK_STEPS = 32
"""The steps of a chunk in plain operations."""

KERNEL_STEPS = 64
"""The fewest steps of a chunk in a kernel."""

MAX_CHUNKS = 16

_MANY_INDICES = 2**31
"""From so many on, indices are numbers of 64 bits, which take several instructions."""


def linear_scan(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    r"""Runs :math:`s_t = f_t \odot s_{t-1} + i_t` over a sequence.

    Computed in float32 with one multiplication and one addition a step, so that on a CPU a row has the
    same bits whatever the batch and however the sequence is cut. On a GPU, sequences of 128 steps or
    more are computed in chunks, which changes the last bits. Source: arXiv 2311.04823 eq. 4.

    Args:
        f: Forget gates `(B, L, D)`, any float dtype.
        i: Gated inputs `(B, L, D)`.
        state: :math:`s_0`, float32 `(B, D)`.

    Returns:
        All states, float32 `(B, L, D)`, and the last one, float32 `(B, D)`.

    Raises:
        ValueError: The shapes do not agree.

    Example:
        >>> f, i = mx.full((1, 4, 1), 0.5), mx.ones((1, 4, 1))
        >>> states, last = linear_scan(f, i, mx.zeros((1, 1)))
        >>> states.flatten().tolist(), last.item()
        ([1.0, 1.5, 1.75, 1.875], 1.875)
    """
    if f.ndim != 3 or i.shape != f.shape or state.shape != (f.shape[0], f.shape[2]):
        raise ValueError(
            f"[linear_scan] 'f', 'i' and 'state' must have shapes (B, L, D), (B, L, D) and (B, D) "
            f"but got {f.shape}, {i.shape} and {state.shape}."
        )
    if f.size == 0:
        return mx.zeros(f.shape), state.astype(mx.float32)
    states, last = _operation(f, i, state)
    return states, last


def reference(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """The definition: one step after the other."""
    length = f.shape[1]
    if length == 0:
        return mx.zeros(f.shape, mx.float32), state
    # Time first, so that one step is one contiguous (B, D) block.
    gates = positions(f.astype(mx.float32).swapaxes(0, 1), axis=0)
    inputs = positions(i.astype(mx.float32).swapaxes(0, 1), axis=0)
    states = []
    last = state.astype(mx.float32)[None]
    for gate, value in zip(gates, inputs, strict=True):
        last = gate * last + value
        states.append(last)
    return mx.concatenate(states, axis=0).swapaxes(0, 1), last[0]


def native(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """One pass over the sequence in C++. Its gradient is a kernel too."""
    states, last = _kernel()(*(x.astype(mx.float32) for x in (f, i, state)))
    return states, last


def _chunked(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Plain operations, parallel over chunks."""
    states, last = _scan_in_chunks(f, i, state)
    return states, last


def _states(f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    batch, length, dims = f.shape
    if length <= CHUNK_STEPS:
        return reference(f, i, state)
    chunks = -(-length // CHUNK_STEPS)
    padding = [(0, 0), (0, chunks * CHUNK_STEPS - length), (0, 0)]
    shape = (batch, chunks, CHUNK_STEPS, dims)
    # steps that change nothing
    f = mx.pad(f.astype(mx.float32), padding, constant_values=1.0).reshape(shape)
    i = mx.pad(i.astype(mx.float32), padding).reshape(shape)

    products, sums = [f[:, :, 0]], [i[:, :, 0]]
    for step in range(1, CHUNK_STEPS):
        gate = f[:, :, step]
        products.append(gate * products[-1])
        sums.append(gate * sums[-1] + i[:, :, step])
    after, last = _states(products[-1], sums[-1], state)
    before = mx.concatenate([state.astype(mx.float32)[:, None], after[:, :-1]], axis=1)
    states = mx.stack(products, axis=2) * before[:, :, None] + mx.stack(sums, axis=2)
    return states.reshape(batch, chunks * CHUNK_STEPS, dims)[:, :length], last


def _gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, ...]:
    f, _, state = inputs
    gates = f.astype(mx.float32)
    # the gradient that reaches a step goes through the gate of the next one
    after = mx.concatenate([gates[:, 1:], mx.ones_like(gates[:, :1])], axis=1)
    backwards, _ = _states(after[:, ::-1], cotangents[0][:, ::-1], cotangents[1])
    of_i = backwards[:, ::-1]
    before = mx.concatenate([state.astype(mx.float32)[:, None], outputs[0][:, :-1]], axis=1)
    gradients = of_i * before, of_i, gates[:, 0] * of_i[:, 0]
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, inputs, strict=True))


_scan_in_chunks = with_reference_gradient(_states, reference, _gradients)


# A SIMD group runs one chunk of 32 neighbouring channels, of `length` steps of `dims` channels.
INDICES = """
    const int lane = thread_index_in_simdgroup;
    const int chunk = simdgroup_index_in_threadgroup;
    const int chunks = simdgroups_per_threadgroup;
    const int channel = threadgroup_position_in_grid.x * 32 + lane;
    const int steps = (length + chunks - 1) / chunks;
    const int start = min(chunk * steps, length);
    const int stop = channel < dims ? min(start + steps, length) : start;
    const size_t row = static_cast<size_t>(threadgroup_position_in_grid.y) * dims + channel;
    // of the sequence, and of this channel at a step of it
    const Place first_step = static_cast<Place>(threadgroup_position_in_grid.y) * length;
    Place at;
    threadgroup float products[16 * 32];
    threadgroup float sums[16 * 32];
    float product = 1;
    float sum = 0;
"""


_FORWARD = """
    if (chunk + 1 < chunks) {
        at = (first_step + start) * dims + channel;
        for (int t = start; t < stop; t++) {
            <load>
            product *= gate;
            sum = gate * sum + input;
            at += dims;
        }
    }
    products[chunk * 32 + lane] = product;
    sums[chunk * 32 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float value = channel < dims ? static_cast<float>(state[row]) : 0.0f;
    for (int c = 0; c < chunk; c++) value = products[c * 32 + lane] * value + sums[c * 32 + lane];
    at = (first_step + start) * dims + channel;
    for (int t = start; t < stop; t++) {
        <load>
        value = gate * value + input;
        states[at] = value;
        at += dims;
    }
    if (channel < dims && chunk + 1 == chunks) last[row] = value;
"""


def forward_scan(shape: str, load: str) -> str:
    """The source of a kernel that computes all `states` and the `last` from a `state`.

    Args:
        shape: Sets `length` and `dims`.
        load: Sets `gate` and `input` of step `t`, which stand at index `at` of `(B, length, dims)`.
    """
    return shape + INDICES + _FORWARD.replace("<load>", load.strip())


def type_of_index(shape: Sequence[int]) -> mx.Dtype:
    """The type of indices for gates of the shape `(B, length, dims)`."""
    # a model's gates lie beside each other, three for each channel
    return mx.uint64 if 3 * math.prod(shape) >= _MANY_INDICES else mx.uint32


def launch_scan(
    kernel: Any,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    index_type: mx.Dtype | None,
    template: Sequence[tuple[str, bool | mx.Dtype]] = (),
) -> list[mx.array]:
    """Launches a kernel of which the first of the output's `shapes` is `(B, length, dims)`.

    Indices are of the type `index_type`, which the shape decides if it is `None`.
    """
    batch, length, dims = shapes[0]
    chunks = min(max(length // KERNEL_STEPS, 1), MAX_CHUNKS)
    threads = launch.SIMD_GROUP * chunks
    return launch.launch(
        kernel,
        inputs=inputs,
        template=[*template, ("Place", index_type or type_of_index(shapes[0]))],
        grid=(-(-dims // launch.SIMD_GROUP) * threads, batch, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
    )


_SHAPE = """
    const int length = f_shape[1];
    const int dims = f_shape[2];
"""


_FORWARD_KERNEL: dict[str, Any] = {
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
_BACKWARD_KERNEL: dict[str, Any] = {
    "name": "linear_scan_backward",
    # (B, L, D), (B, D), (B, L, D), (B, L, D), (B, D)
    "input_names": ["f", "state", "states", "states_gradient", "last_gradient"],
    # (B, L, D), (B, L, D), (B, D)
    "output_names": ["f_gradient", "i_gradient", "state_gradient"],
    "source": _SHAPE
    + INDICES
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
        forward: What launches `_FORWARD_KERNEL`, as `launch.launch` takes it.
        backward: What launches `_BACKWARD_KERNEL`.
    """

    def __init__(self, forward: Any, backward: Any):
        self._forward, self._backward = forward, backward
        self._scan = with_reference_gradient(self._states, reference, self._gradients)

    def unsupported(self, f: mx.array, i: mx.array, state: mx.array) -> str | None:
        if reason := not_floats(f, i, state):
            return reason
        dtypes = {"f": f.dtype, "i": i.dtype}
        index_type = type_of_index(f.shape)
        return self_check.kernel_fault(
            "linear_scan_forward",
            partial(self._states, index_type=index_type),
            reference,
            partial(_check_inputs, **dtypes),
            **dtypes,
            index_type=index_type,
        ) or self_check.kernel_fault(
            "linear_scan_backward",
            partial(self._gradients_of_itself, index_type=index_type),
            lambda *inputs: mx.vjp(reference, [*inputs], [*reference(*inputs)])[1],
            partial(_check_inputs, **dtypes),
            **dtypes,
            index_type=index_type,
        )

    def run(self, f: mx.array, i: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        states, last = self._scan(f, i, state)
        return states, last

    def _states(
        self, f: mx.array, i: mx.array, state: mx.array, index_type: mx.Dtype | None = None
    ) -> tuple[mx.array, mx.array]:
        inputs = [f, i, state.astype(mx.float32)]
        states, last = launch_scan(self._forward, inputs, [f.shape, state.shape], index_type)
        return states, last

    def _gradients(
        self,
        inputs: Sequence[mx.array],
        cotangents: Sequence[mx.array],
        outputs: Sequence[mx.array],
        index_type: mx.Dtype | None = None,
    ) -> tuple[mx.array, ...]:
        f, _, state = inputs
        gradients = launch_scan(
            self._backward,
            [f, state.astype(mx.float32), outputs[0], *cotangents],
            [f.shape, f.shape, state.shape],
            index_type,
        )
        return tuple(g.astype(x.dtype) for g, x in zip(gradients, inputs, strict=True))

    def _gradients_of_itself(self, *inputs: mx.array, index_type: mx.Dtype) -> tuple[mx.array, ...]:
        """The gradients where the results are their own cotangents."""
        results = reference(*inputs)
        return self._gradients(inputs, results, results, index_type)


def _check_inputs(f: mx.Dtype, i: mx.Dtype) -> tuple[mx.array, ...]:
    # two chunks, and more than one SIMD group of channels
    shape = (2, 2 * KERNEL_STEPS + 2, launch.SIMD_GROUP + 1)
    pattern = mx.arange(math.prod(shape)).reshape(shape)
    gates = (pattern * 37 % 101) / 101.0
    values = (pattern * 53 % 97) / 48.0 - 1.0
    return gates.astype(f), values.astype(i), values[:, 0] + 0.5


def _cost(call: Call) -> Cost:
    count = call.inputs[0].size
    return Cost(work(multiply=count, add=count))


def _examples() -> Iterator[Example]:
    # arrays of fewer than 8 numbers lie in another address space of Metal
    for dims, dtype in product((32, 4), FLOATS):
        x = mx.zeros((1, 2, dims), dtype)
        yield Example((x, x, mx.zeros((1, dims))))
    # with indices of 64 bits
    x = mx.zeros((1, 2**16, 2**15))
    yield Example((x, x, mx.zeros((1, 2**15))))


_kernel = native_kernel("linear_scan")
_metal = ScanKernels(
    mx.fast.metal_kernel(**_FORWARD_KERNEL), mx.fast.metal_kernel(**_BACKWARD_KERNEL)
)
cuda_kernels = ScanKernels(
    CudaKernel.of_metal(**_FORWARD_KERNEL), CudaKernel.of_metal(**_BACKWARD_KERNEL)
)
_operation = Operation(
    "linear_scan",
    _examples,
    costs={"LinearScan": _cost},
    metal=Backend(_metal.run, _metal.unsupported),
    cuda=Backend(cuda_kernels.run, cuda_kernels.unsupported),
    native=native,
    # its last bits depend on how a sequence is cut, which must not be so on a CPU
    chunked=Backend(_chunked, only_on=mx.gpu),
    reference=reference,
)
