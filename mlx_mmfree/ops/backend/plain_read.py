"""Reads matrices on Metal and does hardly anything else, as a limit for products with them."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from ..bit_linear.metal_groups import OUTPUTS, OUTPUTS_PER_GROUP, SIMD_GROUPS
from . import launch
from .self_check import kernel_fault, packed_pattern

# The grid, the rows of a SIMD group and the order of its loads are those of `bit_linear`.
_kernel = mx.fast.metal_kernel(
    name="plain_read",
    input_names=["words"],  # (N, W)
    output_names=["out"],  # one number for each SIMD group
    header=f"constant constexpr int ROWS = {OUTPUTS_PER_GROUP};",
    source="""
    const int rows = words_shape[0];
    const int width = words_shape[1];
    const int lane = thread_index_in_simdgroup;
    const int group = threadgroup_position_in_grid.x * simdgroups_per_threadgroup
        + simdgroup_index_in_threadgroup;
    const int first = ROWS * group;
    if (first >= rows) return;

    const device uint* lines = words + static_cast<size_t>(first) * width;
    uint4 found = uint4(0u);
    int line[ROWS];
    #pragma clang loop unroll(full)
    for (int n = 0; n < ROWS; n++) line[n] = min(n, rows - 1 - first) * width;
    for (int word = lane; word < width; word += 32) {
        uint4 read;
        #pragma clang loop unroll(full)
        for (int n = 0; n < ROWS; n++) read[n] = lines[line[n] + word];
        found = found | read;
    }
    // a result that depends on every word, so that no load is left out
    const float sum = simd_sum(static_cast<float>(found[0] | found[1] | found[2] | found[3]));
    if (lane == 0) out[group] = sum;
    """,
)

_LANES = launch.SIMD_GROUP
_MIN_WORDS = 8
"""Smaller arrays lie in another address space."""


def plain_read(words: mx.array) -> mx.array:
    """Reads each word of a matrix once.

    Args:
        words: uint32 `(N, W)`, of 8 words at least.

    Returns:
        float32, one number for each 4 rows: the sum over 32 lanes of the bits that are set in any of the
        words that the lane has read. Lane l reads words l, l + 32, ... of all 4 rows.
    """
    threads = SIMD_GROUPS * _LANES
    (sums,) = launch.launch(
        _kernel,
        inputs=[words],
        grid=(threads * -(-words.shape[0] // OUTPUTS), 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(-(-words.shape[0] // OUTPUTS_PER_GROUP),)],
        output_dtypes=[mx.float32],
    )
    return sums


def fault() -> str | None:
    """Why the kernel must not be used on the default device, or `None`."""
    # a second threadgroup, and more words than lanes
    inputs = partial(packed_pattern, OUTPUTS + 2, _LANES + 1)
    return kernel_fault("plain_read", plain_read, _definition, lambda: [inputs()])


def as_words(arrays: Sequence[mx.array]) -> list[mx.array]:
    """The memory of arrays as matrices of words, without those too small to be read alone."""
    found = []
    for array in arrays:
        if array.nbytes < 4 * _MIN_WORDS or array.nbytes % 4:
            continue
        flat = array.reshape(-1).view(mx.uint32)
        is_matrix = array.ndim > 1 and flat.size % array.shape[0] == 0
        found.append(flat.reshape(array.shape[0] if is_matrix else 1, -1))
    return found


def _definition(words: mx.array) -> mx.array:
    rows, width = words.shape
    groups, steps = -(-rows // OUTPUTS_PER_GROUP), -(-width // _LANES)
    padding = [(0, groups * OUTPUTS_PER_GROUP - rows), (0, steps * _LANES - width)]
    lanes = mx.pad(words, padding).reshape(groups, OUTPUTS_PER_GROUP, steps, _LANES)
    found = mx.zeros((groups, _LANES), mx.uint32)
    for row in range(OUTPUTS_PER_GROUP):
        for step in range(steps):
            found = mx.bitwise_or(found, lanes[:, row, step])
    return found.astype(mx.float32).sum(axis=-1)
