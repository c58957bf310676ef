"""Chooses the backend that runs an operation.

A backend of the operation `<op>` is the module `ops/<op>/<backend>.py`. Its function `run(...)` takes
the arguments that the operation hands on. If it cannot run with all of them, a function
`unsupported(...)` returns the reason in words, or `None`. `ONLY_ON` names the kind of device if it runs
on one alone. Only this module asks MLX on which device operations run.

A function `check(...)` of the package `ops/<op>` raises `ValueError` where arguments do not fit. It is
called before a backend, but for one with `CHECKS_ARGUMENTS`: that one refuses such arguments itself, in
less time, and `check` only finds the words.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx

from ... import native
from ...errors import BackendError, UsageError
from . import launch

BACKENDS = ("metal", "cuda", "native", "chunked", "reference")
"""The known backends in order of preference.

Example:
    >>> BACKENDS[-1]
    'reference'
"""

ENVIRONMENT_VARIABLE = "MLX_MMFREE_BACKEND"

_CPU = mx.Device(mx.cpu)
_NOT_ON = {mx.cpu: "the default device is not the CPU", mx.gpu: "the default device is not a GPU"}

_forced: ContextVar[str | None] = ContextVar("forced_backend", default=None)
# "" inside `use_any_backend`, and this inside `use_plain_operations`
_PLAIN = "plain operations"
_KERNELS = ("metal", "cuda", "native")


@cache
def _backends(package: str) -> dict[str, ModuleType]:
    """The backends that the operation has, in order of preference."""
    modules = {name: f"{package}.{name}" for name in BACKENDS}
    return {
        name: importlib.import_module(module)
        for name, module in modules.items()
        if importlib.util.find_spec(module)
    }


def has_backend(package: str, name: str) -> bool:
    """Whether the operation whose package is named has this backend."""
    return name in _backends(package)


def backend_module(package: str, name: str) -> ModuleType:
    """A backend of the operation whose package is named."""
    return _backends(package)[name]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Forces one backend for every operation inside the `with` block.

    Args:
        name: One of `BACKENDS`. An operation that this backend cannot run raises `BackendError`.

    Raises:
        ValueError: No backend has this name.

    Example:
        >>> with use_backend("reference"):
        ...     y = rms_norm(mx.array([3.0, 4.0]), eps=0.0)
        >>> [round(n, 4) for n in y.tolist()]
        [0.8485, 1.1314]
    """
    if name not in BACKENDS:
        raise ValueError(f"[use_backend] 'name' {_rule(name)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def use_any_backend() -> Iterator[None]:
    """Forces no backend inside the `with` block, whatever is forced outside of it.

    Inside `use_plain_operations` it changes nothing.
    """
    token = _forced.set(_PLAIN if uses_plain_operations() else "")
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def use_plain_operations() -> Iterator[None]:
    """Lets every operation consist of MLX's own inside the `with` block.

    Packed weights stay as they are. Programs that know nothing of this library can repeat such a graph.
    """
    token = _forced.set(_PLAIN)
    try:
        yield
    finally:
        _forced.reset(token)


def uses_plain_operations() -> bool:
    """Whether `use_plain_operations` is in force."""
    return _forced.get() == _PLAIN


def forced_backend() -> str | None:
    """The backend forced by `use_backend` or by the environment, or `None`.

    Raises:
        UsageError: The environment names an unknown backend.
    """
    name = _forced.get()
    return environment_backend() if name is None else name or None


@cache
def environment_backend() -> str | None:
    """The backend that the environment names when it is first asked, or `None`.

    Raises:
        UsageError: The environment names an unknown backend.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise UsageError(f"[environment] '{ENVIRONMENT_VARIABLE}' {_rule(name)}")
    return name


def _rule(name: str) -> str:
    return f"must be one of {', '.join(BACKENDS)} but got {name!r:.40}."


def dispatch(package: str, *args: Any, **kwargs: Any) -> Any:
    """Runs the operation of a package on the forced backend, or on the first that fits.

    Raises:
        BackendError: The forced backend cannot run these arguments, or no backend can.
    """
    if forced := forced_backend():
        return _run_forced(forced, package, args, kwargs)
    for run, unsupported, check, explain in _candidates(package, on_cpu()):
        if check is not None:
            check(*args, **kwargs)
        if unsupported is None or unsupported(*args, **kwargs) is None:
            try:
                return run(*args, **kwargs)
            except (TypeError, ValueError):
                if explain is not None:
                    explain(*args, **kwargs)
                raise
    raise BackendError(f"[{_name(package)}] no backend can run these arguments.")


class _Candidate(NamedTuple):
    """A backend that the default device has; `None` for functions that it does not have or need.

    Attributes:
        run: Computes.
        unsupported: Why it cannot run with some arguments.
        check: Refuses wrong arguments before it runs.
        explain: Refuses wrong arguments, in words, that it has refused itself.
    """

    run: Callable[..., Any]
    unsupported: Callable[..., str | None] | None
    check: Callable[..., None] | None
    explain: Callable[..., None] | None


@cache
def _candidates(package: str, on_cpu: bool) -> list[_Candidate]:
    """The backends that a kind of device has, in order of preference.

    They are found once, because each decoded token asks for them some hundred times.
    """
    check = _check(package)
    return [
        _Candidate(
            backend.run,
            vars(backend).get("unsupported"),
            None if _checks_arguments(backend) else check,
            check if _checks_arguments(backend) else None,
        )
        for name, backend in _backends(package).items()
        if _missing(name, backend) is None
    ]


@contextmanager
def recorded_calls(package: str) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Records with which arguments an operation is called inside the `with` block, in any thread.

    Where a backend is forced, nothing is recorded.

    Yields:
        The arguments of each call, by place and by name.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def recording(run: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return run(*args, **kwargs)

        return record

    candidates = _candidates(package, on_cpu())
    usual = list(candidates)
    candidates[:] = [each._replace(run=recording(each.run)) for each in usual]
    try:
        yield calls
    finally:
        candidates[:] = usual


def forget_candidates() -> None:
    """Looks again for the backends that devices have, as a test needs that changes them."""
    _candidates.cache_clear()


def _check(package: str) -> Callable[..., None] | None:
    """What refuses wrong arguments of the operation."""
    return vars(importlib.import_module(package)).get("check")


def _checks_arguments(backend: ModuleType) -> bool:
    return bool(vars(backend).get("CHECKS_ARGUMENTS"))


def _run_forced(name: str, package: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (check := _check(package)) is not None:
        check(*args, **kwargs)
    if name == _PLAIN:
        name = _plain_backend(package, args, kwargs)
    backend = _backends(package).get(name)
    reason: str | None = "it is not written"
    if backend is not None:
        reason = _unsupported(name, backend, args, kwargs)
    if backend is None or reason:
        raise BackendError(f"[{_name(package)}] the forced backend '{name}' cannot run: {reason}.")
    return backend.run(*args, **kwargs)


def _plain_backend(package: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The first backend without kernels of this library; the definition takes whatever others refuse."""
    return next(
        name
        for name, backend in _backends(package).items()
        if name not in _KERNELS and _unsupported(name, backend, args, kwargs) is None
    )


def on_cpu() -> bool:
    """Whether operations run on the CPU."""
    return mx.default_device() == _CPU


def device_type() -> mx.DeviceType:
    """The kind of device on which operations run."""
    return mx.default_device().type


def metal_unavailable() -> str | None:
    """Returns `None` if Metal kernels can run on the default device, else the reason.

    Where their texts are only recorded, they can on every device.
    """
    if launch.is_recording() or (mx.metal.is_available() and not on_cpu()):
        return None
    return "no Metal device"


def cuda_unavailable() -> str | None:
    """Returns `None` if the default device is an NVIDIA GPU, else the reason."""
    return None if mx.cuda.is_available() and not on_cpu() else "no CUDA device"


def native_unavailable() -> str | None:
    """Returns `None` if the compiled kernels can run on the default device, else the reason.

    Where the texts of Metal's kernels are recorded, they cannot.
    """
    if launch.is_recording():
        return "kernels of Metal are recorded"
    return native.unavailable() if on_cpu() else _NOT_ON[mx.cpu]


def _unsupported(
    name: str, backend: ModuleType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why a backend cannot run these arguments here, or `None`."""
    reason = _missing(name, backend)
    if reason or (unsupported := vars(backend).get("unsupported")) is None:
        return reason
    found: str | None = unsupported(*args, **kwargs)
    return found


def _missing(name: str, backend: ModuleType) -> str | None:
    """What the default device lacks for a backend, or `None`."""
    if name == "metal":
        return metal_unavailable()
    if name == "cuda":
        return cuda_unavailable()
    if name == "native":
        return native_unavailable()
    only_on: mx.DeviceType | None = vars(backend).get("ONLY_ON")
    return None if only_on is None or only_on == device_type() else _NOT_ON[only_on]


def _name(package: str) -> str:
    """The name of the operation."""
    return package.rpartition(".")[2]


def backend_report(package: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Asks each backend of an operation whether it can run some arguments.

    Args:
        package: The operation's package, such as `"mlx_mmfree.ops.rms_norm"`.
        args: What the operation hands to its backends.
        kwargs: Likewise.

    Returns:
        For each backend why it cannot run them, or `None` where it can.

    Example:
        >>> report = backend_report("mlx_mmfree.ops.rms_norm", mx.ones((1, 8)), None, eps=1e-6)
        >>> report["reference"] is None
        True
    """
    return {
        name: _unsupported(name, backend, args, kwargs)
        for name, backend in _backends(package).items()
    }
