"""Times the Metal kernels at sizes of published models, beside a plain read of the same weights."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from ...errors import BackendError
from ...platform.gpu_time import queued_seconds
from ..bit_linear import Projection, bit_linear
from ..gated_rms_norm import gated_rms_norm
from ..linear_scan import linear_scan
from ..mlgru_step import mlgru_step
from ..rms_norm_quantize import rms_norm_quantize
from ..ternary import packed_width
from ..ternary_matmul import ternary_matmul
from . import choice, dispatch
from .dispatch import use_backend
from .inspection import read_seconds
from .self_check import packed_pattern

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
            size = sum(array.nbytes for array in (*arrays, *_as_list(call())))
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
