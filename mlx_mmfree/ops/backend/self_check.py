"""Checks every kernel on the device that is to run it, against the operation's definition.

At its first use a kernel computes one tiny input. If it does not compile, fails or differs from the
definition, it is switched off with one warning, and the next backend does its work. The results are
stored in the library's cache folder, so that the next process does not check again. A failure that may
pass, such as too little memory, is not stored.
"""

import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...platform.threads import ComputingThread
from . import choice, dispatch, launch, stored_results

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""The largest error allowed for a dtype of results, relative to the definition's largest value."""

Faults = dict[str, str | None]

_SECTION = "kernels"
# a compiler names the line of a text that it refuses: Metal's compiler, or CUDA's; Metal and MLX name
# what a threadgroup takes too much of
_REFUSED_TEXT = re.compile(
    r":\d+:\d+: (?:fatal )?error: |\(\d+\): (?:catastrophic )?error: "
    r"|exceeds the maximum threadgroup memory allowed|is greater than the maximum allowed threads"
)


class Check(NamedTuple):
    """The finding of a check of a kernel.

    Attributes:
        kernel: Its name, with the variant.
        fault: Why it must not be used; `None` if it is sound.
        error: The largest error, relative to the definition's largest value. `None` if the kernel did
            not run, or if an earlier process checked it.
        first_difference: The first index where it is wrong, with both values; `None` if none is.
    """

    kernel: str
    fault: str | None
    error: float | None = None
    first_difference: str | None = None


_checks: dict[tuple[Any, ...], Check] = {}
_later: ContextVar[list[Callable[[], object]] | None] = ContextVar("later", default=None)


@contextmanager
def collecting() -> Iterator[list[Callable[[], object]]]:
    """Takes kernels for sound inside the `with` block, where none of them may run.

    Yields:
        What checks the kernels that were asked for, each as a function that any thread may call.
    """
    checks: list[Callable[[], object]] = []
    token = _later.set(checks)
    try:
        yield checks
    finally:
        _later.reset(token)


def kernel_fault(
    kernel: str,
    run: Callable[..., Any],
    reference: Callable[..., Any],
    make_inputs: Callable[[], Sequence[Any]],
    **variant: Any,
) -> str | None:
    """Returns why a kernel must not be used on the default device, or `None`.

    The answer is stored for each kernel, variant, device, system, version of MLX and text of the
    operations, so that only the first call computes. Several threads may ask.

    Args:
        kernel: Name of the kernel.
        run: Runs the kernel.
        reference: The definition, which is computed on the CPU.
        make_inputs: Makes the arguments of both.
        variant: Everything that selects the code that is compiled.
    """
    if launch.is_recording():
        run(*make_inputs())
        return None
    if (later := _later.get()) is not None:
        later.append(partial(kernel_fault, kernel, run, reference, make_inputs, **variant))
        return None
    device = stored_results.device_name()
    key = (device, kernel, *variant.values())
    if key not in _checks:
        with stored_results.LOCK:
            if key not in _checks:
                name = stored_results.variant_name(kernel, variant)
                found = _stored_or_new(name, lambda: _difference(run, reference, make_inputs()))
                _checks[key] = Check(name, found.fault, found.error, found.first_difference)
                if found.fault:
                    _warn(name, device, found.fault)
    return _checks[key].fault


def checked_kernels() -> Faults:
    """Returns each kernel checked so far with its fault, or `None` for a sound one."""
    return {check.kernel: check.fault for check in _checks.values()}


def checks() -> list[Check]:
    """Returns what was found of each kernel checked so far."""
    return [*_checks.values()]


def check_again() -> None:
    """Forgets all checks of the default device, also those that the cache folder keeps."""
    with stored_results.LOCK:
        _checks.clear()
        stored_results.stored(_SECTION).clear()


def packed_pattern(outputs: int, words: int) -> mx.array:
    """Packed trits of all three kinds, `(outputs, words)`, the same in every process."""
    pattern = mx.arange(outputs * words, dtype=mx.uint32).reshape(outputs, words) * 2654435761
    # no code may be 3
    return pattern - mx.bitwise_and(mx.bitwise_and(pattern, pattern >> 1), 0x55555555)


def _warn(name: str, device: str, fault: str) -> None:
    warnings.warn(
        f"[mlx_mmfree] The kernel {name} is switched off on {device} with MLX "
        f"{stored_results.mlx_version()}: {fault}. Other code does its work, slower.",
        RuntimeWarning,
        stacklevel=3,
    )


def _stored_or_new(name: str, check: Callable[[], "_Finding"]) -> "_Finding":
    known = stored_results.stored(_SECTION)
    fault = known.get(name, 0)
    if fault is None or isinstance(fault, str):
        return _Finding(fault)
    found = check()
    if found.lasts:
        known[name] = found.fault
        stored_results.store()
    return found


class _Finding(NamedTuple):
    """The finding of a check, and whether another process would find the same."""

    fault: str | None
    lasts: bool = True
    error: float | None = None
    first_difference: str | None = None


def _difference(
    run: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Any]
) -> _Finding:
    with mx.stream(mx.cpu), dispatch.use_backend("reference"):
        wanted = _as_list(reference(*inputs))
        mx.eval(wanted)
    try:
        got = _as_list(run(*inputs))
        mx.eval(got)
    # what MLX raises when a kernel does not compile or cannot be launched
    except (RuntimeError, ValueError, MemoryError) as failure:
        message = " ".join(str(failure).split())
        is_refused = _REFUSED_TEXT.search(message) is not None
        return _Finding(f"it does not run ({message[:400]})", is_refused)
    worst = 0.0
    with mx.stream(mx.cpu):
        for result, expected in zip(got, wanted, strict=True):
            largest = float(mx.abs(expected).max().item())  # type: ignore[arg-type]
            error = float(mx.abs(result - expected).max().item())  # type: ignore[arg-type]
            relative = error / largest if largest else error
            # written so that NaN fails too
            if not error <= TOLERANCE[result.dtype] * largest:
                fault = f"it computes wrong values (off by {error:.3g} of {largest:.3g})"
                return _Finding(fault, True, relative, _first_difference(result, expected, largest))
            worst = max(worst, relative)
    return _Finding(None, error=worst)


def _first_difference(result: mx.array, expected: mx.array, largest: float) -> str:
    """The first index beyond the tolerance, with both values."""
    got, wanted = (np.array(each.astype(mx.float32)) for each in (result, expected))
    most = TOLERANCE[result.dtype] * largest
    # written so that NaN is a difference too
    index = tuple(np.argwhere(~(np.abs(got - wanted) <= most))[0].tolist())
    return f"at {[*index]}: {got[index]:.6g} instead of {wanted[index]:.6g}"


def _as_list(results: Any) -> list[mx.array]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def check_early(build: Callable[[], object]) -> threading.Thread | None:
    """Checks the Metal kernels that a graph needs, so that their first use need not.

    What the graph needs is collected here, since MLX lets no thread compute the lazy arrays of another.
    The thread makes arrays of its own. Whatever fails is left to the first use, which says so.

    Args:
        build: Builds the graph. Nothing of it is computed.

    Returns:
        The thread that checks them, or `None` where there is no Metal or no kernel is asked for.
    """
    if dispatch.metal_unavailable() is not None or dispatch.forced_backend() not in (None, "metal"):
        return None
    # a model that cannot be run like this one is no reason not to load it
    with collecting() as checks, choice.use(choice.DEFAULT), suppress(Exception):
        build()
    if not checks:
        return None
    thread = ComputingThread(target=_check_all, args=(checks,), name="mlx_mmfree kernel checks")
    thread.start()
    return thread


def _check_all(checks: Sequence[Callable[[], object]]) -> None:
    for check in checks:
        # a process that ends does not wait for all of them
        if not threading.main_thread().is_alive():
            return
        with suppress(Exception):
            check()
