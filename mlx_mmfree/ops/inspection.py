"""Tells what runs each operation on this machine, and why other backends do not.

It also writes the texts of the Metal kernels to files, for Metal's compiler on a Mac.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import native
from ..errors import UsageError
from ..files.writing import new_folder, writing
from .backend import choice, dispatch, launch, self_check
from .backend.dispatch import forced_backend, on_cpu, operations, use_any_backend
from .backend.gradient import assume_gradients
from .backend.metal_functions import keeps_half_denormals, record_half_denormals, without_halves
from .kernel_times import plain_read, plain_read_fault

_Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CpuKernels:
    """The compiled CPU kernels.

    Attributes:
        reason: Why they cannot be used, with a hint, or `None`.
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
    """Why the CPU computes with plain operations that nobody asked for, with a hint, or `None`."""
    if not on_cpu() or forced_backend() is not None:
        return None
    reason = native.unavailable()
    if reason is None:
        return None
    return (
        "Decoding takes 10 to 20 times as long as it could, and unpacked ternary weights take up to a "
        f"quarter of the free memory: {reason}"
    )


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
    rows: Sequence[int] = launch.EXAMPLE_ROWS, progress: _Progress | None = None
) -> dict[str, dict[str, str | None]]:
    """Why each backend of each operation cannot run here, or `None` if it can.

    Every backend is asked with small arguments of each kind that the layers use. Where there is Metal,
    this checks every Metal kernel again, whatever was found before. A backend that refuses several
    arguments shows its first reason, and one that takes some of them says so.

    Args:
        rows: The numbers of rows for which products are asked, of `launch.EXAMPLE_ROWS`.
        progress: Called with how many arguments were asked for, and how many there are.
    """
    self_check.check_again()
    if dispatch.metal_unavailable() is None:
        plain_read_fault()
        keeps_half_denormals()
    calls = [
        (operation, example)
        for operation in operations().values()
        for example in operation.examples()
        if example.rows in (None, *rows)
    ]
    found: dict[str, dict[str, str | None]] = {operation.name: {} for operation, _ in calls}
    taken = set()
    for count, (operation, example) in enumerate(calls, start=1):
        op = operation.name
        with choice.use(example.product), assume_gradients(example.is_trained):
            report = operation.report(*example.args, **example.kwargs)
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


def kernel_checks() -> list[dict[str, Any]]:
    """Returns each kernel of a GPU checked so far, with its `fault`, `error` and `first_difference`."""
    return [check._asdict() for check in self_check.checks()]


def kernel_texts() -> dict[str, str]:
    """Returns the texts of all Metal kernels by their names, as MLX hands them to Metal's compiler.

    These are the kernels that `operation_reports` checks. No Metal device is needed.
    """
    texts = _texts_of_operations()
    with launch.recording() as others:
        plain_read(mx.zeros((4, 4), mx.uint32))
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
        for operation in operations().values():
            # an optimizer's step is left to MLX's own operations
            if (backend := operation.backends.get("metal")) is None:
                continue
            for example in operation.examples():
                with choice.use(example.product), assume_gradients(example.is_trained):
                    # what is checked, the gradient's kernels too, and what would run
                    if backend.unsupported is not None:
                        backend.unsupported(*example.args, **example.kwargs)
                    backend.run(*example.args, **example.kwargs)
    return texts


SCRIPT = "compile.sh"
# what MLX puts before each text
_PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n'
_SCRIPT = """#!/bin/sh
# Compiles every kernel with the Metal compiler of Xcode, and prints those that do not compile.
cd "$(dirname "$0")" || exit 1
failed=0
for file in *.metal; do
  xcrun -sdk macosx metal -std=metal3.1 -I {include} -c "$file" -o /dev/null || {{
    echo "$file does not compile"
    failed=$((failed + 1))
  }}
done
echo "$failed of {count} kernels do not compile"
[ "$failed" -eq 0 ]
"""


def write_kernel_files(folder: Path) -> int:
    """Writes each kernel to a file `.metal`, and a script that compiles them all.

    Args:
        folder: A folder that does not exist or is empty.

    Returns:
        The number of kernels.

    Raises:
        UsageError: There are files in the folder, or it is a file.
        CheckpointError: The folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"[doctor] '--dump-kernels' must be a new or empty folder but '{folder}' is neither."
        )
    texts = kernel_texts() | fallback_texts()
    include = Path(mx.__file__).parent / "include"
    script = _SCRIPT.format(include=shlex.quote(str(include)), count=len(texts))
    with writing("doctor", folder), new_folder(folder) as new:
        for number, (name, text) in enumerate(sorted(texts.items())):
            # the ends of names, types of arguments, may be longer than a file's name can be
            short = name.removeprefix("custom_kernel_")[:80]
            (new / f"{number:03}_{short}.metal").write_text(f"{_PREAMBLE}{text}")
        (new / SCRIPT).write_text(script)
    return len(texts)
