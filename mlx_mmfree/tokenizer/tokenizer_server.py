"""Reads and uses one vocabulary inside the confined process."""

from dataclasses import asdict
from typing import Any

from .tokenizer_engine import TokenizerEngine

_engines: list[TokenizerEngine] = []


def handle(request: tuple[str, Any]) -> dict[str, Any]:
    """Reads a vocabulary, `("read", arguments)`, or encodes a text, `("encode", arguments)`."""
    name, arguments = request
    if name == "read":
        data, special = arguments
        _engines[:] = [TokenizerEngine(data, special, is_alone=True)]
        return {"ids": _engines[0].ids(), **asdict(_engines[0].describe())}
    return {"ids": _engines[0].encode(*arguments)}
