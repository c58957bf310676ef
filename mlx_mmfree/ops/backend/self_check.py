"""Checks every kernel on the device that is to run it, against the operation's definition.

At its first use a kernel computes one tiny input. If it does not compile, fails or differs from the
definition, it is switched off with one warning, and the next backend does its work. The results are kept
in the library's cache folder, so that the next process does not check again.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ...files.json_reader import parse_json
from ...files.opening import read_file
from ...files.replacing import new_file
from ...platform.cache_folder import cache_folder
from . import launch
from .dispatch import device_type, use_backend

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""The largest error allowed for a dtype of results, relative to the definition's largest value."""

Faults = dict[str, str | None]

_MAX_RESULT_BYTES = 1_000_000


class _Check(NamedTuple):
    kernel: str
    fault: str | None


_checks: dict[tuple[Any, ...], _Check] = {}
_kept: dict[Path, Faults] = {}


def kernel_fault(
    kernel: str,
    run: Callable[..., Any],
    reference: Callable[..., Any],
    make_inputs: Callable[[], Sequence[Any]],
    **variant: Any,
) -> str | None:
    """Returns why a kernel must not be used on the default device, or `None`.

    The answer is kept for each kernel, variant, device, version of MLX and text of the operations, so
    that only the first call computes.

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
    device = _device_name(device_type())
    key = (device, kernel, *variant.values())
    if key not in _checks:
        values = ", ".join(f"{name}={value}" for name, value in variant.items())
        name = f"{kernel}({values})".replace("mlx.core.", "")
        fault = _kept_or_new_fault(device, name, lambda: _difference(run, reference, make_inputs()))
        _checks[key] = _Check(name, fault)
        if fault:
            warnings.warn(
                f"[mlx_mmfree] The Metal kernel {name} is switched off on {device} with MLX "
                f"{_mlx_version()}: {fault}. Other code does its work, slower.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _checks[key].fault


def checked_kernels() -> Faults:
    """Returns each kernel checked so far with its fault, or `None` for a sound one."""
    return dict(_checks.values())


def check_again() -> None:
    """Forgets all results of the default device, also those that the cache folder keeps."""
    _checks.clear()
    if file := _file(_device_name(device_type())):
        _kept[file] = {}


def packed_pattern(outputs: int, words: int) -> mx.array:
    """Packed trits of all three kinds, `(outputs, words)`, the same in every process."""
    pattern = mx.arange(outputs * words, dtype=mx.uint32).reshape(outputs, words) * 2654435761
    # no code may be 3
    return pattern - mx.bitwise_and(mx.bitwise_and(pattern, pattern >> 1), 0x55555555)


def _kept_or_new_fault(device: str, name: str, check: Callable[[], str | None]) -> str | None:
    file = _file(device)
    if file is None:
        return check()
    if file not in _kept:
        _kept[file] = _read(file)
    known = _kept[file]
    if name not in known:
        known[name] = check()
        _write(file, known)
    return known[name]


def _file(device: str) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    facts = "\0".join((device, _mlx_version(), _text_of_operations()))
    return folder / "kernel_checks" / f"{sha256(facts.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> Faults:
    try:
        found = parse_json(read_file(file, _MAX_RESULT_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: fault for name, fault in found.items() if fault is None or isinstance(fault, str)}


def _write(file: Path, faults: Faults) -> None:
    # without a folder to write to, each process checks anew
    with suppress(OSError), new_file(file) as new:
        new.write_text(json.dumps(faults, indent=1))


@cache
def _text_of_operations() -> str:
    """A digest of the code of all kernels and of what launches them."""
    digest = sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _device_name(kind: mx.DeviceType) -> str:
    return str(mx.device_info(mx.Device(kind))["device_name"])


@cache
def _mlx_version() -> str:
    return version("mlx")


def _difference(
    run: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Any]
) -> str | None:
    with mx.stream(mx.cpu), use_backend("reference"):
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
