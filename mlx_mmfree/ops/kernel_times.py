"""Times the Metal kernels at sizes of published models, beside a plain read of the same weights.

The plain read, a kernel that reads matrices and does hardly anything else, is a limit for products.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import BackendError
from ..platform.memory_reader import queued_seconds
from .backend import choice, dispatch, launch
from .backend.dispatch import native_kernel, use_backend
from .backend.self_check import kernel_fault, packed_pattern
from .bit_linear import Projection, bit_linear
from .linear_scan import linear_scan
from .mlgru_step import mlgru_step
from .norms import gated_rms_norm
from .rms_norm_quantize import rms_norm_quantize
from .ternary import packed_width
from .ternary_matmul import ternary_matmul

_SIMD_GROUPS, _ROWS_OF_A_GROUP = 8, 4
_ROWS = _SIMD_GROUPS * _ROWS_OF_A_GROUP

# Threadgroups and the order of loads are as in `bit_linear`, where a SIMD group has 4 outputs.
_kernel = mx.fast.metal_kernel(
    name="plain_read",
    input_names=["words"],  # (N, W)
    output_names=["out"],  # one number for each SIMD group
    header=f"constant constexpr int ROWS = {_ROWS_OF_A_GROUP};",
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
    threads = _SIMD_GROUPS * _LANES
    (sums,) = launch.launch(
        _kernel,
        inputs=[words],
        grid=(threads * -(-words.shape[0] // _ROWS), 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(-(-words.shape[0] // _ROWS_OF_A_GROUP),)],
        output_dtypes=[mx.float32],
    )
    return sums


def plain_read_fault() -> str | None:
    """Why the kernel must not be used on the default device, or `None`."""
    # a second threadgroup, and more words than lanes
    inputs = partial(packed_pattern, _ROWS + 2, _LANES + 1)
    return kernel_fault("plain_read", plain_read, _definition, lambda: [inputs()])


def _definition(words: mx.array) -> mx.array:
    rows, width = words.shape
    groups, steps = -(-rows // _ROWS_OF_A_GROUP), -(-width // _LANES)
    padding = [(0, groups * _ROWS_OF_A_GROUP - rows), (0, steps * _LANES - width)]
    lanes = mx.pad(words, padding).reshape(groups, _ROWS_OF_A_GROUP, steps, _LANES)
    found = mx.zeros((groups, _LANES), mx.uint32)
    for row in range(_ROWS_OF_A_GROUP):
        for step in range(steps):
            found = mx.bitwise_or(found, lanes[:, row, step])
    return found.astype(mx.float32).sum(axis=-1)


def _as_words(arrays: Sequence[mx.array]) -> list[mx.array]:
    """The memory of arrays as matrices of words, without those too small to be read alone."""
    found = []
    for array in arrays:
        if array.nbytes < 4 * _MIN_WORDS or array.nbytes % 4:
            continue
        flat = array.reshape(-1).view(mx.uint32)
        is_matrix = array.ndim > 1 and flat.size % array.shape[0] == 0
        found.append(flat.reshape(array.shape[0] if is_matrix else 1, -1))
    return found


def total_bytes(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def read_seconds(arrays: Sequence[mx.array]) -> float | None:
    """The time in which kernels of this library read the arrays, or `None` without them.

    On the CPU the threads of the compiled kernels read, each a contiguous share. On Metal a kernel with
    the grid of a ternary product reads each array of 8 words and more, all of them queued.
    """
    if dispatch.metal_unavailable() is None:
        if plain_read_fault():
            return None
        matrices = _as_words(arrays)
        mx.eval(matrices)
        return queued_seconds(lambda: [plain_read(matrix) for matrix in matrices])
    if dispatch.native_unavailable():
        return None
    return float(_read_on_cpu()(list(arrays)))


_read_on_cpu = native_kernel("read_seconds")


SIZES = ((2048, 2048), (2560, 6912))
"""Inputs and outputs of matrices."""

ROWS = (1, 8, 32, 64, 512)

LEAST_BYTES = 128 * 2**20
"""The bytes of all matrices of a measurement, more than caches hold."""


class KernelTime(NamedTuple):
    """How long a kernel takes.

    Attributes:
        kernel: The operation, and for products the way that computes them.
        rows, inputs, outputs: The shape.
        seconds: The time of one call, of many that are queued.
        bytes_per_second: For products the packed weights that are read, else all inputs and outputs.
        share_of_read: That rate as a share of the rate of a plain read, or `None` where none was taken.
    """

    kernel: str
    rows: int
    inputs: int
    outputs: int
    seconds: float
    bytes_per_second: float
    share_of_read: float | None


def kernel_times(
    sizes: Sequence[tuple[int, int]] = SIZES,
    rows: Sequence[int] = ROWS,
    least_bytes: int = LEAST_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[KernelTime]:
    """Times each kernel, in some seconds; nothing where there is no Metal.

    Products are timed in each way in which they can be computed, whatever was chosen.

    Args:
        sizes: Inputs and outputs of matrices.
        rows: Numbers of rows.
        least_bytes: The bytes of the matrices of a measurement.
        progress: Called with how many sizes are timed, and how many there are.
    """
    if dispatch.metal_unavailable() is not None:
        return []
    found: list[KernelTime] = []
    for count, (inputs, outputs) in enumerate(sizes, start=1):
        found += _products(inputs, outputs, rows, least_bytes)
        for number in rows:
            found += _others(inputs, number)
        if progress is not None:
            progress(count, len(sizes))
    return found


def _products(
    inputs: int, outputs: int, rows: Sequence[int], least_bytes: int
) -> Iterator[KernelTime]:
    words = packed_pattern(outputs, packed_width(inputs))
    matrices = [words + 0 for _ in range(-(-least_bytes // words.nbytes))]
    mx.eval(matrices)
    size = len(matrices) * words.nbytes
    read = read_seconds(matrices)
    if read is not None:
        each = read / len(matrices)
        yield KernelTime("plain_read", 1, inputs, outputs, each, size / read, 1.0)
    for (name, multiply), number, way in product(_PRODUCTS.items(), rows, choice.ON_METAL):
        x = _values(number, inputs)
        with choice.use(way):
            seconds = _seconds([partial(multiply, x, weight) for weight in matrices])
        if seconds is not None:
            share = None if read is None else read / seconds
            each = seconds / len(matrices)
            yield KernelTime(f"{name}, {way}", number, inputs, outputs, each, size / seconds, share)


def _project(x: mx.array, weight: mx.array) -> mx.array:
    return bit_linear(x, [Projection(weight, mx.array([1.0]))])


_PRODUCTS = {"bit_linear": _project, "ternary_matmul": ternary_matmul}


def _others(dims: int, rows: int) -> Iterator[KernelTime]:
    x, weight = _values(rows, dims), mx.ones((dims,), mx.float16)
    gates, state = _values(rows, 3 * dims)[None], mx.zeros((1, dims))
    for run, arrays in (
        (partial(rms_norm_quantize, eps=1e-6), (x, weight)),
        (partial(gated_rms_norm, eps=1e-6), (x, x, weight)),
        (partial(mlgru_step, eps=1e-6), (gates, state, weight)),
        (partial(linear_scan), (x[None], x[None], state)),
    ):
        call = partial(run, *arrays)
        seconds = _seconds([call])
        if seconds is not None:
            size = total_bytes([*arrays, *_as_list(call())])
            name = run.func.__name__
            yield KernelTime(name, rows, dims, dims, seconds, size / seconds, None)


def _seconds(calls: Sequence[Callable[[], Any]]) -> float | None:
    """The time of all calls on Metal, or `None` where a kernel is switched off."""
    try:
        with use_backend("metal"):
            return queued_seconds(lambda: [y for call in calls for y in _as_list(call())])
    except BackendError:
        return None


def _values(rows: int, dims: int) -> mx.array:
    values = mx.sin(mx.arange(rows * dims)).reshape(rows, dims).astype(mx.float16)
    mx.eval(values)
    return values


def _as_list(results: Any) -> list[mx.array]:
    return list(results) if isinstance(results, (tuple, list)) else [results]
