"""Language models without dense matrix multiplication, on MLX.

A prompt is continued in three lines::

    from mlx_mmfree import generate, load

    model, tokenizer = load("ridger/MMfreeLM-370M")
    print(generate(model, tokenizer, "Once upon a time"))

`BitLinear`, `GQA`, `MLGRU` and `SwiGLU` are building blocks for networks of your own.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .channel_mixers import SwiGLU
    from .generation import (
        batch_generate,
        embed,
        embed_tokens,
        generate,
        make_processors,
        make_sampler,
        stream_generate,
    )
    from .hub import fuse, load, load_model, load_plugin, load_tokenizer, save_model
    from .layers import BitLinear
    from .token_mixers import GQA, MLGRU
    from .training import FineTuneSettings, lora

__all__ = [
    "GQA",
    "MLGRU",
    "BitLinear",
    "FineTuneSettings",
    "SwiGLU",
    "__version__",
    "batch_generate",
    "embed",
    "embed_tokens",
    "fuse",
    "generate",
    "load",
    "load_model",
    "load_plugin",
    "load_tokenizer",
    "lora",
    "make_processors",
    "make_sampler",
    "save_model",
    "stream_generate",
]

# imported at their first use, so that a command answers '--help' and Ctrl-C at once
_PACKAGES = {
    "channel_mixers": ("SwiGLU",),
    "generation": (
        "batch_generate",
        "embed",
        "embed_tokens",
        "generate",
        "make_processors",
        "make_sampler",
        "stream_generate",
    ),
    "hub": ("fuse", "load", "load_model", "load_plugin", "load_tokenizer", "save_model"),
    "layers": ("BitLinear",),
    "token_mixers": ("GQA", "MLGRU"),
    "training": ("FineTuneSettings", "lora"),
}
_HOMES = {name: package for package, names in _PACKAGES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        packages = ", ".join((*_PACKAGES, "models", "ops"))
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}. Further names are in its packages "
            f"{packages}."
        )
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
