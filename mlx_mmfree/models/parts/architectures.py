"""Finds the architecture of a model by what its `config.json` says."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from ...errors import UnsupportedModelError
from .architecture import Architecture, Config

_PACKAGE = "mlx_mmfree.models"
"""Each file in it, or on its search path, is an architecture."""


def architectures() -> dict[str, Architecture]:
    """Lists the architectures that can be loaded.

    Returns:
        All of them by name.

    Example:
        >>> "bitnet" in architectures()
        True
    """
    return _architectures(tuple(importlib.import_module(_PACKAGE).__path__))


@cache
def _architectures(search: tuple[str, ...]) -> dict[str, Architecture]:
    files = (entry.name for entry in pkgutil.iter_modules(search) if not entry.ispkg)
    modules = (importlib.import_module(f"{_PACKAGE}.{name}") for name in files)
    return {module.ARCHITECTURE.name: module.ARCHITECTURE for module in modules}


def known_model_types() -> list[str]:
    """Lists the names of the architectures that can be loaded.

    Returns:
        The values of `model_type`, sorted.

    Example:
        >>> "hgrn_bit" in known_model_types()
        True
    """
    return sorted(architectures())


def find(model_type: object) -> Architecture:
    """Finds an architecture by its name.

    Args:
        model_type: The name, as `config.json` has it.

    Returns:
        The architecture.

    Raises:
        UnsupportedModelError: None has this name.

    Example:
        >>> find("bitnet").name
        'bitnet'
    """
    if isinstance(model_type, str) and model_type in architectures():
        return architectures()[model_type]
    raise UnsupportedModelError(
        f"[load] 'model_type' must be one of {', '.join(known_model_types())} but got "
        f"{model_type!r:.100}. This architecture is not implemented."
    )


def find_described(config: Mapping[str, Any]) -> Architecture:
    """Finds the architecture of a `config.json`: by its `model_type`, or by timm's `architecture`.

    Args:
        config: What the file says.

    Returns:
        The architecture.

    Raises:
        UnsupportedModelError: There is none.

    Example:
        >>> find_described({"model_type": "bitnet"}).name
        'bitnet'
    """
    name = config.get("architecture")
    if "model_type" in config or not isinstance(name, str):
        return find(config.get("model_type"))
    for architecture in architectures().values():
        if name in architecture.variants:
            return architecture
    raise UnsupportedModelError(
        f"[load] 'architecture' must be one of {', '.join(known_variants())} but got {name!r:.100}. "
        "This architecture is not implemented."
    )


def known_variants() -> list[str]:
    """The `architecture` values of models of images that can be loaded, sorted."""
    return sorted(name for each in architectures().values() for name in each.variants)


def architecture_of(config: Config) -> Architecture:
    """Finds the architecture that a model's description belongs to.

    Args:
        config: The description, the attribute `config` of a model.

    Returns:
        The architecture.

    Raises:
        UnsupportedModelError: There is none.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> architecture_of(model.config).name
        'hgrn_bit'
    """
    return find_described(config.to_hub())
