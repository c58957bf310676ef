"""Finds mixers by the names that descriptions of models use: those of their files."""

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from ...errors import UnsupportedModelError
from ...layers import ChannelMixer
from ...layers.mixer import SpatialMixer, TokenMixer

_CAPABILITIES = {
    "causal": "causal",
    "bidirectional": "bidirectional",
    "cross": "cross",
    "recurrent": "constant state",
    "length_bound": "bounded length",
    "packs_samples": "packing",
}


def token_mixers() -> dict[str, type[TokenMixer]]:
    """All token mixers by name, sorted."""
    return _mixers("mlx_mmfree.token_mixers", TokenMixer)


def spatial_mixers() -> dict[str, type[SpatialMixer]]:
    """All spatial mixers by name, sorted."""
    return _mixers("mlx_mmfree.spatial_mixers", SpatialMixer)


def channel_mixers() -> dict[str, type[ChannelMixer]]:
    """All channel mixers by name, sorted."""
    return _mixers("mlx_mmfree.channel_mixers", ChannelMixer)


def _mixers(package: str, base: type) -> dict[str, Any]:
    """Each file of the package, or on its search path, holds a mixer of its name."""
    return _found(package, base, tuple(importlib.import_module(package).__path__))


@cache
def _found(package: str, base: type, search: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in sorted(entry.name for entry in pkgutil.iter_modules(search)):
        module = importlib.import_module(f"{package}.{name}")
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, base) and value.__module__ == module.__name__:
                found[name] = value
    return found


def capabilities(mixer: type[TokenMixer]) -> list[str]:
    """What mixers of this class can do, in words."""
    return [words for name, words in _CAPABILITIES.items() if getattr(mixer, name)]


def find_token_mixer(name: object) -> type[TokenMixer]:
    """The mixer of this name.

    Raises:
        UnsupportedModelError: None has this name; the known ones are listed with what they can do.
    """
    known = token_mixers()
    if isinstance(name, str) and name in known:
        return known[name]
    listed = "; ".join(f"{key} ({', '.join(capabilities(mixer))})" for key, mixer in known.items())
    raise UnsupportedModelError(
        f"[model] a token mixer must be one of those that follow but got {name!r:.100}: {listed}."
    )


def find_spatial_mixer(name: object) -> type[SpatialMixer]:
    """The spatial mixer of this name.

    Raises:
        UnsupportedModelError: None has this name.
    """
    known = spatial_mixers()
    if isinstance(name, str) and name in known:
        return known[name]
    raise UnsupportedModelError(
        f"[model] a spatial mixer must be one of {', '.join(known)} but got {name!r:.100}."
    )


def find_channel_mixer(name: object) -> type[ChannelMixer]:
    """The channel mixer of this name.

    Raises:
        UnsupportedModelError: None has this name.
    """
    known = channel_mixers()
    if isinstance(name, str) and name in known:
        return known[name]
    raise UnsupportedModelError(
        f"[model] a channel mixer must be one of {', '.join(known)} but got {name!r:.100}."
    )
