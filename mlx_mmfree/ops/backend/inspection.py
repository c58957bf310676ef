"""Tells what runs each operation on this machine, and why other backends do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ... import native
from ...platform.gpu_time import queued_seconds
from . import choice, dispatch, launch, plain_read, self_check
from .dispatch import (
    backend_module,
    backend_report,
    forced_backend,
    has_backend,
    native_unavailable,
    on_cpu,
    use_any_backend,
)
from .example_calls import ROWS, example_calls
from .gradient_tracing import assume_gradients
from .metal_functions import keeps_half_denormals, record_half_denormals, without_halves

_Progress = Callable[[int, int], None]


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


def operation_reports(
    rows: Sequence[int] = ROWS, progress: _Progress | None = None
) -> dict[str, dict[str, str | None]]:
    """Why each backend of each operation cannot run here, or `None` if it can.

    Every backend is asked with small arguments of each kind that the layers use. Where there is Metal,
    this checks every Metal kernel again, whatever was found before. A backend that refuses several
    arguments shows its first reason, and one that takes some of them says so.

    Args:
        rows: The numbers of rows for which products are asked.
        progress: Called with how many arguments were asked for, and how many there are.
    """
    self_check.check_again()
    if dispatch.metal_unavailable() is None:
        plain_read.fault()
        keeps_half_denormals()
    calls = [(op, call) for op, those in example_calls(rows).items() for call in those]
    found: dict[str, dict[str, str | None]] = {op: {} for op, _ in calls}
    taken = set()
    for count, (op, call) in enumerate(calls, start=1):
        with choice.use(call.product), assume_gradients(call.is_trained):
            report = backend_report(_package(op), *call.args, **call.kwargs)
        for name, reason in report.items():
            found[op][name] = found[op].get(name) or reason
            if reason is None:
                taken.add((op, name))
        if progress is not None:
            progress(count, len(calls))
    for op, name in taken:
        if (reason := found[op][name]) is not None:
            found[op][name] = f"runs some calls, but not where {reason}"
    return found


def metal_kernels() -> dict[str, str | None]:
    """Returns each kernel of a GPU checked so far with its fault, or `None` for a sound one."""
    return self_check.checked_kernels()


def kernel_texts() -> dict[str, str]:
    """Returns the texts of all Metal kernels by their names, as MLX hands them to Metal's compiler.

    These are the kernels that `operation_reports` checks. No Metal device is needed.
    """
    texts = _texts_of_operations()
    with launch.recording() as others:
        plain_read.plain_read(mx.zeros((4, 4), mx.uint32))
        record_half_denormals()
    return texts | others


def fallback_texts() -> dict[str, str]:
    """Returns the texts of the Metal kernels on a device that flushes denormal halves to zero.

    Only those are among them that are others than in `kernel_texts`.
    """
    usual = kernel_texts()
    with without_halves():
        texts = _texts_of_operations()
    return {name: text for name, text in texts.items() if name not in usual}


def _texts_of_operations() -> dict[str, str]:
    with launch.recording() as texts, use_any_backend():
        for op, calls in example_calls(ROWS).items():
            # an optimizer's step is left to MLX's own operations
            if not has_backend(_package(op), "metal"):
                continue
            backend = backend_module(_package(op), "metal")
            for call in calls:
                with choice.use(call.product), assume_gradients(call.is_trained):
                    # what is checked, the gradient's kernels too, and what would run
                    if "unsupported" in vars(backend):
                        backend.unsupported(*call.args, **call.kwargs)
                    backend.run(*call.args, **call.kwargs)
    return texts


def _package(op: str) -> str:
    return f"{__name__.rsplit('.', 2)[0]}.{op}"
