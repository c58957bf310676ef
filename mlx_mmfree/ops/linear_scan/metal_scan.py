"""A linear recurrence on Metal, parallel over channels and, in long sequences, over chunks of steps.

With a thread for each channel alone, a batch of 4 rows of 1,024 channels would have 128 SIMD groups,
which wait for memory at each of their steps. Up to 16 chunks of a sequence let as many groups wait at
once. That costs a second read of the gates and inputs of all chunks but one.

A chunk of steps maps the state before it to the state after it by `s -> product * s + sum`. Every chunk
first finds its two numbers. Then it starts from the state to which the chunks before it lead. The last
bits of long sequences therefore depend on how they are cut into calls.
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend import launch

CHUNK_STEPS = 64
MAX_CHUNKS = 16
_MANY_PLACES = 2**31
"""From so many on, places are numbers of 64 bits, which take several instructions."""

# A SIMD group runs one chunk of 32 neighbouring channels, of `length` steps of `dims` channels.
PLACE = """
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
        load: Sets `gate` and `input` of step `t`, which stand at place `at` of `(B, length, dims)`.
    """
    return shape + PLACE + _FORWARD.replace("<load>", load.strip())


def place_type(shape: Sequence[int]) -> mx.Dtype:
    """The type of places for gates of the shape `(B, length, dims)`."""
    # a model's gates lie beside each other, three for each channel
    return mx.uint64 if 3 * math.prod(shape) >= _MANY_PLACES else mx.uint32


def launch_scan(
    kernel: Any,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    place: mx.Dtype | None,
    template: Sequence[tuple[str, bool | mx.Dtype]] = (),
) -> list[mx.array]:
    """Launches a kernel of which the first of the output's `shapes` is `(B, length, dims)`.

    Places are of the type `place`, which the shape decides if it is `None`.
    """
    batch, length, dims = shapes[0]
    chunks = min(max(length // CHUNK_STEPS, 1), MAX_CHUNKS)
    threads = launch.SIMD_GROUP * chunks
    return launch.launch(
        kernel,
        inputs=inputs,
        template=[*template, ("Place", place or place_type(shapes[0]))],
        grid=(-(-dims // launch.SIMD_GROUP) * threads, batch, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
    )
