"""Puts the folders beside this file on the search paths of the packages of their names.

The library then finds the files in them as it finds its own. The module is a plugin of pytest too:
`-p tests.adding.search_path` lets any of the other tests find the new files.
"""

import importlib
from pathlib import Path

PACKAGES = ("token_mixers", "models", "cli", "hub.checkpoint.formats", "ops")


def extend() -> None:
    """Lets the packages find the new files."""
    for name in PACKAGES:
        path = importlib.import_module(f"mlx_mmfree.{name}").__path__
        folder = _folder(name)
        if folder not in path:
            path.append(folder)


def retract() -> None:
    """Lets the packages find nothing but their own files again."""
    for name in PACKAGES:
        importlib.import_module(f"mlx_mmfree.{name}").__path__.remove(_folder(name))


def _folder(name: str) -> str:
    return str(Path(__file__).with_name(name.rpartition(".")[2]))


def pytest_configure() -> None:
    extend()
