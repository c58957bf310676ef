"""Checks every kernel on the device that is to run it, against the operation's definition.

At its first use a kernel computes one tiny input. If it does not compile, fails or differs, it is
switched off for the process with one warning, and the work goes to the next backend.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import mlx.core as mx

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest error allowed, relative to the largest value of the definition, by dtype of the result."""

_faults: dict[tuple[str, str, str], str | None] = {}


def kernel_fault(
    kernel: str,
    run: Callable[..., Any],
    reference: Callable[..., Any],
    make_inputs: Callable[[], tuple[Any, ...]],
) -> str | None:
    """Returns why a kernel must not be used on the default device, or None.

    The answer is kept for each kernel, device and version of MLX; only the first call computes.

    Args:
        kernel: Name of the kernel, with all that selects the code that is compiled.
        run: Runs the kernel.
        reference: The definition; computed on the CPU.
        make_inputs: Makes the arguments of both.
    """
    kernel = kernel.replace("mlx.core.", "")
    device, mlx_version = _device_name(mx.default_device().type), _mlx_version()
    key = (kernel, device, mlx_version)
    if key not in _faults:
        _faults[key] = _difference(run, reference, make_inputs())
        if fault := _faults[key]:
            warnings.warn(
                f"[mlx_mmfree] The Metal kernel {kernel} is switched off on {device} with MLX "
                f"{mlx_version}: {fault}. Other code does its work, slower.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _faults[key]


@cache
def _device_name(kind: mx.DeviceType) -> str:
    return str(mx.device_info(mx.Device(kind))["device_name"])


@cache
def _mlx_version() -> str:
    return version("mlx")


def checked_kernels() -> dict[str, str | None]:
    """Returns each kernel checked so far with its fault, None for a sound one."""
    return {kernel: fault for (kernel, _, _), fault in _faults.items()}


def _difference(
    run: Callable[..., Any], reference: Callable[..., Any], inputs: tuple[Any, ...]
) -> str | None:
    with mx.stream(mx.cpu):
        wanted = _as_list(reference(*inputs))
        mx.eval(wanted)
    try:
        got = _as_list(run(*inputs))
        mx.eval(got)
    # what MLX raises when a kernel does not compile or cannot be launched
    except (RuntimeError, ValueError) as failure:
        message = " ".join(str(failure).split())
        return f"it does not run ({message[:400]})"
    with mx.stream(mx.cpu):
        for result, expected in zip(got, wanted, strict=True):
            largest = float(mx.abs(expected).max().item())  # type: ignore[arg-type]
            error = float(mx.abs(result - expected).max().item())  # type: ignore[arg-type]
            # written so that NaN fails too
            if not error <= TOLERANCE[result.dtype] * largest:
                return f"it computes wrong values (off by {error:.3g} of {largest:.3g})"
    return None


def _as_list(results: Any) -> list[mx.array]:
    return list(results) if isinstance(results, (tuple, list)) else [results]
