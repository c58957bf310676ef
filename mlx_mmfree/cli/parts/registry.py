"""The names and modules of all commands: files of their package, and what plug-ins add."""

import importlib
import importlib.util
import pkgutil
from typing import Any

from ...files import plugins

_PACKAGE = "mlx_mmfree.cli"
"""Each file of this package, or of a folder on its search path, is a command."""


def command_names() -> list[str]:
    """The names of all commands: the files of their package, and what installed packages add."""
    return sorted({*_own_names(), *(each.name for each in plugins.installed("commands"))})


def _own_names() -> list[str]:
    search = importlib.import_module(_PACKAGE).__path__
    return [entry.name for entry in pkgutil.iter_modules(search) if not entry.ispkg]


def command_module(name: str) -> Any:
    """The module of a command, or `None`. No plug-in replaces a command of the package."""
    if name in _own_names():
        return importlib.import_module(f"{_PACKAGE}.{name}")
    return next(
        (plugins.entry_module(each) for each in plugins.installed("commands") if each.name == name),
        None,
    )
