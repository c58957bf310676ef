"""Finds the token mixers by the names that descriptions of models use."""

import importlib
import inspect
import pkgutil
from functools import cache

from ...errors import UnsupportedModelError
from ...layers.token_mixer import TokenMixer

_PACKAGE = "mlx_mmfree.token_mixers"
"""Each file in it, or on its search path, holds a mixer of its name."""

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
    return _token_mixers(tuple(importlib.import_module(_PACKAGE).__path__))


@cache
def _token_mixers(search: tuple[str, ...]) -> dict[str, type[TokenMixer]]:
    found = {}
    for name in sorted(entry.name for entry in pkgutil.iter_modules(search)):
        module = importlib.import_module(f"{_PACKAGE}.{name}")
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, TokenMixer) and value.__module__ == module.__name__:
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
    listed = "\n".join(f"  {key}: {', '.join(capabilities(mixer))}" for key, mixer in known.items())
    raise UnsupportedModelError(
        f"[model] a token mixer must be one of those below but got {name!r:.100}.\n{listed}"
    )
