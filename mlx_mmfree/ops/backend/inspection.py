"""Tells what runs each operation on this machine, and why other backends do not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from ... import native
from ...platform.gpu_time import queued_seconds
from ..activations import ACTIVATIONS
from ..attention_step import Options as AttentionOptions
from ..bit_linear import Options as ProjectionOptions
from ..bit_linear import Projection
from ..dense_matmul import BITS, AffineForm
from ..float_dtypes import FLOATS
from ..mlgru_step import Options as GateOptions
from ..ternary import packed_width
from . import dispatch, launch, plain_read, self_check
from .dispatch import (
    backend_module,
    backend_report,
    forced_backend,
    native_unavailable,
    on_cpu,
    use_any_backend,
)

# arrays of fewer than 8 numbers lie in another address space of Metal
_DIMS = (32, 4)


class Call(NamedTuple):
    """The arguments that an operation hands to its backends."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class CpuKernels:
    """The compiled CPU kernels.

    Attributes:
        reason: Why they cannot be used, with the way out, or `None`.
        instructions: The instruction set in use, or `None`.
        choices: All instruction sets for which this processor has kernels, fastest first.
        threads: The number of threads that compute, or `None`.
    """

    reason: str | None
    instructions: str | None = None
    choices: tuple[str, ...] = ()
    threads: int | None = None


def cpu_kernels() -> CpuKernels:
    """Describes the compiled CPU kernels."""
    if reason := native.unavailable():
        return CpuKernels(reason)
    module = native.kernels()
    return CpuKernels(None, module.kernel_name(), tuple(module.kernel_names()), module.threads())


def slow_cpu() -> str | None:
    """Why the CPU computes with plain operations that nobody asked for, with the way out, or `None`."""
    if not on_cpu() or forced_backend() is not None:
        return None
    reason = native.unavailable()
    if reason is None:
        return None
    return (
        "Decoding takes 10 to 20 times as long as it could, and unpacked ternary weights take up to a "
        f"quarter of the free memory: {reason}"
    )


def read_seconds(arrays: Sequence[mx.array]) -> float | None:
    """The time in which kernels of this library read the arrays, or `None` without them.

    On the CPU the threads of the compiled kernels read, each a contiguous share. On Metal a kernel with
    the grid of a ternary product reads each array of 8 words and more, all of them queued.
    """
    if dispatch.metal_unavailable() is None:
        if plain_read.fault():
            return None
        matrices = plain_read.as_words(arrays)
        mx.eval(matrices)
        return queued_seconds(lambda: [plain_read.plain_read(matrix) for matrix in matrices])
    if native_unavailable():
        return None
    return float(native.kernels().read_seconds(list(arrays)))


def multiply_rate(seconds: float = 0.02) -> float | None:
    """The most multiply-accumulates of 8-bit numbers a second of which the CPU is capable.

    Args:
        seconds: About how long it is measured.

    Returns:
        The rate of all threads together, or `None` if no compiled kernel has such dot products.
    """
    if native.unavailable():
        return None
    return float(native.kernels().multiply_rate(seconds)) or None


def operation_reports() -> dict[str, dict[str, str | None]]:
    """Why each backend of each operation cannot run here, or `None` if it can.

    Every backend is asked with small arguments of each kind that the layers use. Where there is Metal,
    this checks every Metal kernel again, whatever was found before. A backend that refuses several
    arguments shows its first reason.
    """
    self_check.check_again()
    found: dict[str, dict[str, str | None]] = {}
    for op, calls in _calls().items():
        found[op] = {}
        for call in calls:
            report = backend_report(_package(op), *call.args, **call.kwargs)
            for name, reason in report.items():
                found[op][name] = found[op].get(name) or reason
    return found


def metal_kernels() -> dict[str, str | None]:
    """Returns each Metal kernel checked so far with its fault, or `None` for a sound one."""
    return self_check.checked_kernels()


def kernel_texts() -> dict[str, str]:
    """Returns the texts of all Metal kernels by their names, as MLX hands them to Metal's compiler.

    These are the kernels that `operation_reports` checks, for every number of rows and every dtype, and
    the plain read of the benchmark.
    No Metal device is needed.
    """
    with launch.recording() as texts, use_any_backend():
        for op, calls in _calls(rows=(*range(1, 9), 64)).items():
            backend = backend_module(_package(op), "metal")
            for call in calls:
                # what is checked, the gradient's kernels too, and what would run
                if "unsupported" in vars(backend):
                    backend.unsupported(*call.args, **call.kwargs)
                backend.run(*call.args, **call.kwargs)
        plain_read.plain_read(mx.zeros((4, 4), mx.uint32))
    return texts


def _package(op: str) -> str:
    return f"{__name__.rsplit('.', 2)[0]}.{op}"


def _calls(rows: Sequence[int] = (1, 64)) -> dict[str, Iterator[Call]]:
    return {
        "attention": _attention_calls(),
        "attention_step": _attention_step_calls(),
        "bit_linear": _bit_linear_calls(rows),
        "dense_matmul": _dense_matmul_calls(),
        "gated_rms_norm": _gated_rms_norm_calls(),
        "linear_scan": _linear_scan_calls(),
        "mlgru_step": _mlgru_step_calls(),
        "rms_norm_quantize": _rms_norm_quantize_calls(),
        "ternary_matmul": _ternary_matmul_calls(rows),
    }


def _attention_calls() -> Iterator[Call]:
    for dtype in FLOATS:
        x = mx.zeros((1, 1, 2, 64), dtype)
        yield Call((x, x, x, "causal"), {})


def _attention_step_calls() -> Iterator[Call]:
    options = AttentionOptions(num_heads=2, wavelengths=mx.ones((32,)))
    for dtype in FLOATS:
        buffer = mx.zeros((1, 1, 2, 64), dtype)
        projected, positions = mx.zeros((1, 1, 4 * 64), dtype), mx.zeros((1, 1), mx.int32)
        yield Call((projected, buffer, buffer, positions, options), {})


def _dense_matmul_calls() -> Iterator[Call]:
    for dtype in FLOATS:
        x, weight = mx.zeros((1, 128), dtype), mx.zeros((4, 128), dtype)
        yield Call((x, weight, None), {})
        for bits in BITS:
            group = mx.zeros((4, 2), dtype)
            codes = mx.zeros((4, 4 * bits), mx.uint32)
            yield Call((x, codes, AffineForm(group, group, 64, bits)), {})


def _bit_linear_calls(numbers_of_rows: Sequence[int]) -> Iterator[Call]:
    for rows, dims, dtype in product(numbers_of_rows, _DIMS, FLOATS):
        x, norm = mx.zeros((rows, dims), dtype), mx.ones((dims,))
        weight, scale = mx.zeros((4, packed_width(dims)), mx.uint32), mx.ones((1,))
        plain = (Projection(weight, scale),)
        yield Call((x, plain, ProjectionOptions()), {})
        wide = Projection(mx.zeros((8, packed_width(dims)), mx.uint32), mx.ones((8,)))
        yield Call((x, (wide,) * 2, ProjectionOptions()), {})
        if rows > launch.FEW_ROWS:
            shared = ProjectionOptions(norm=norm, norm_eps=1e-6)
            for matrices in (3, 4):
                yield Call((x, (wide,) * matrices, shared), {})
        yield Call((x, plain, ProjectionOptions(quantize=False)), {})
        normed = ProjectionOptions(eps=1e-6, rounding="half_away", norm=norm, norm_eps=1e-6)
        yield Call((x, (Projection(weight, scale, norm),) * 3, normed), {})
        down = (Projection(mx.zeros((4, packed_width(dims // 2)), mx.uint32), scale),)
        for gate in ACTIVATIONS:
            yield Call((x, down, ProjectionOptions(gate=gate, residual=x[:, :4])), {})


def _gated_rms_norm_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        x = mx.zeros((1, dims), dtype)
        yield Call((x, x, mx.ones((dims,))), {"eps": 1e-6})


def _mlgru_step_calls() -> Iterator[Call]:
    for length, dims, dtype in product((1, 2), _DIMS, FLOATS):
        options = GateOptions(eps=1e-6, lower_bound=mx.zeros((dims,), dtype))
        gates = mx.zeros((1, length, 3 * dims), dtype)
        yield Call((gates, mx.zeros((1, dims)), mx.ones((dims,)), options), {})
        places = mx.ones((1, length), mx.bool_)
        options = GateOptions(eps=1e-6, valid=places, starts=places)
        yield Call((gates, mx.zeros((1, dims)), mx.ones((dims,)), options), {})


def _linear_scan_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        x = mx.zeros((1, 2, dims), dtype)
        yield Call((x, x, mx.zeros((1, dims))), {})


def _rms_norm_quantize_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        x = mx.zeros((1, dims), dtype)
        for rounding in ("half_even", "half_away"):
            yield Call((x, None), {"eps": None, "rounding": rounding})
            yield Call((x, mx.ones((dims,), dtype)), {"eps": 1e-6, "rounding": rounding})


def _ternary_matmul_calls(numbers_of_rows: Sequence[int]) -> Iterator[Call]:
    # whole words and not
    for rows, dims in product(numbers_of_rows, (*_DIMS, 33)):
        weight = mx.zeros((3, packed_width(dims)), mx.uint32)
        for dtype in FLOATS:
            yield Call((mx.zeros((rows, dims), dtype), weight), {"codes": False})
        yield Call((mx.zeros((rows, dims)), weight), {"codes": True})
