"""Choice of the backend that runs an operation; the only place in `ops` that knows about it.

A backend of the operation `<op>` is the module `ops/<op>/<backend>.py` with two functions of the
operation's own arguments: `unsupported(...)`, the reason in words why it cannot run or `None`, and
`run(...)`.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

from ...errors import BackendError, UsageError
from . import launch

BACKENDS = ("metal", "native", "chunked", "reference")
"""The known backends in order of preference."""

ENVIRONMENT_VARIABLE = "MLX_MMFREE_BACKEND"

_forced: ContextVar[str | None] = ContextVar("forced_backend", default=None)


@cache
def _backends(package: str) -> dict[str, ModuleType]:
    """The backends that the operation has, in order of preference."""
    modules = {name: f"{package}.{name}" for name in BACKENDS}
    return {
        name: importlib.import_module(module)
        for name, module in modules.items()
        if importlib.util.find_spec(module)
    }


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Forces one backend for every operation inside the `with` block.

    Args:
        name: One of `BACKENDS`. An operation that this backend cannot run raises `BackendError`.

    Raises:
        ValueError: There is no backend of this name.
    """
    if name not in BACKENDS:
        raise ValueError(f"[use_backend] 'name' {_rule(name)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_backend() -> str | None:
    """The backend forced by `use_backend` or by the environment, or `None`.

    Raises:
        UsageError: The environment names a backend that there is not.
    """
    return _forced.get() or environment_backend()


@cache
def environment_backend() -> str | None:
    """The backend that the environment names when it is first asked, or `None`.

    Raises:
        UsageError: There is no such backend.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise UsageError(f"[environment] '{ENVIRONMENT_VARIABLE}' {_rule(name)}")
    return name


def _rule(name: str) -> str:
    return f"must be one of {', '.join(BACKENDS)} but got {name!r:.40}."


def dispatch(package: str, *args: Any, **kwargs: Any) -> Any:
    """Runs the operation whose package is named, on the forced or the first fitting backend."""
    backends = _backends(package)
    if forced := forced_backend():
        backend = backends.get(forced)
        reason = "it is not written" if backend is None else backend.unsupported(*args, **kwargs)
        if backend is None or reason:
            raise BackendError(
                f"[{_name(package)}] the forced backend '{forced}' cannot run: {reason}."
            )
        return backend.run(*args, **kwargs)
    for name, backend in backends.items():
        # what every operation's kernel would say first
        if name == "metal" and launch.unavailable():
            continue
        if backend.unsupported(*args, **kwargs) is None:
            return backend.run(*args, **kwargs)
    raise BackendError(f"[{_name(package)}] no backend can run these arguments.")


def _name(package: str) -> str:
    """The name of the operation."""
    return package.rpartition(".")[2]


def backend_report(package: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """For each backend the operation has, why it cannot run these arguments (`None`: it can)."""
    return {
        name: backend.unsupported(*args, **kwargs) for name, backend in _backends(package).items()
    }
