"""Finds the architecture of a `model_type` of the Hub."""

import importlib
import pkgutil
from functools import cache

from ...errors import UnsupportedModelError
from .architecture import Architecture, Config

_PACKAGE = "mlx_mmfree.models"
"""Each file in it, or on its search path, is an architecture."""


def architectures() -> dict[str, Architecture]:
    """All architectures by `model_type`."""
    return _architectures(tuple(importlib.import_module(_PACKAGE).__path__))


@cache
def _architectures(search: tuple[str, ...]) -> dict[str, Architecture]:
    files = (entry.name for entry in pkgutil.iter_modules(search) if not entry.ispkg)
    modules = (importlib.import_module(f"{_PACKAGE}.{name}") for name in files)
    return {module.ARCHITECTURE.name: module.ARCHITECTURE for module in modules}


def known_model_types() -> list[str]:
    """The `model_type` values that can be loaded, sorted."""
    return sorted(architectures())


def find(model_type: object) -> Architecture:
    """The architecture that implements `model_type`.

    Raises:
        UnsupportedModelError: None has this name.
    """
    if isinstance(model_type, str) and model_type in architectures():
        return architectures()[model_type]
    raise UnsupportedModelError(
        f"[load] 'model_type' must be one of {', '.join(known_model_types())} but got "
        f"{model_type!r:.100}. This architecture is not implemented."
    )


def architecture_of(config: Config) -> Architecture:
    """The architecture that a model's description belongs to."""
    return find(config.to_hub()["model_type"])
