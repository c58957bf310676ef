"""Finds the file that implements a `model_type` of the Hub."""

import importlib
import pkgutil
from functools import cache
from types import ModuleType

from ...errors import UnsupportedModelError

_PACKAGE = "mlx_mmfree.models"
"""Each file in it, or on its search path, is an architecture."""


@cache
def _architectures() -> dict[str, ModuleType]:
    search = importlib.import_module(_PACKAGE).__path__
    found: dict[str, ModuleType] = {}
    for entry in pkgutil.iter_modules(search):
        if entry.ispkg:
            continue
        module = importlib.import_module(f"{_PACKAGE}.{entry.name}")
        for model_type in (entry.name, *module.MODEL_TYPES):
            found[model_type] = module
    return found


def known_model_types() -> list[str]:
    """The `model_type` values that can be loaded, sorted."""
    return sorted(_architectures())


def find(model_type: object) -> ModuleType:
    """The module that implements `model_type`.

    Raises:
        UnsupportedModelError: No architecture has this name.
    """
    if isinstance(model_type, str) and model_type in _architectures():
        return _architectures()[model_type]
    raise UnsupportedModelError(
        f"[load] 'model_type' must be one of {', '.join(known_model_types())} but got "
        f"{model_type!r:.100}. This architecture is not implemented."
    )
