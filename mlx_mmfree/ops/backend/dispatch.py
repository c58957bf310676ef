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

BACKENDS = ("metal", "native", "chunked", "reference")
"""The known backends in order of preference."""

ENVIRONMENT_VARIABLE = "MLX_MMFREE_BACKEND"

_forced: ContextVar[str | None] = ContextVar("forced_backend", default=None)


@cache
def _backend(package: str, name: str) -> ModuleType | None:
    module = f"{package}.{name}"
    return importlib.import_module(module) if importlib.util.find_spec(module) else None


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
    if name := _forced.get():
        return name
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise UsageError(f"[environment] '{ENVIRONMENT_VARIABLE}' {_rule(name)}")
    return name


def _rule(name: str) -> str:
    return f"must be one of {', '.join(BACKENDS)} but got {name!r:.40}."


def dispatch(package: str, *args: Any, **kwargs: Any) -> Any:
    """Runs the operation whose package is named, on the forced or the first fitting backend."""
    op = package.rpartition(".")[2]
    if forced := forced_backend():
        backend = _backend(package, forced)
        reason = "it is not written" if backend is None else backend.unsupported(*args, **kwargs)
        if backend is None or reason:
            raise BackendError(f"[{op}] the forced backend '{forced}' cannot run: {reason}.")
        return backend.run(*args, **kwargs)
    for name in BACKENDS:
        backend = _backend(package, name)
        if backend is not None and backend.unsupported(*args, **kwargs) is None:
            return backend.run(*args, **kwargs)
    raise BackendError(f"[{op}] no backend can run these arguments.")


def backend_report(package: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """For each backend the operation has, why it cannot run these arguments (`None`: it can)."""
    found = {name: _backend(package, name) for name in BACKENDS}
    return {
        name: backend.unsupported(*args, **kwargs)
        for name, backend in found.items()
        if backend is not None
    }
