"""Work that the tests give to a confined process."""

import os
import sys
from typing import Any

from mlx_mmfree.platform.confinement.loop import ask_back

_stored: list[Any] = []


def handle(request: tuple[str, Any]) -> dict[str, Any]:
    """Does one chunk of work by name."""
    name, value = request
    if name == "repeat":
        return {"value": value}
    if name == "store":
        _stored.append(value)
    if name in ("store", "stored"):
        return {"value": _stored}
    if name == "ask":
        return {"value": [ask_back(value), ask_back(value + 1)]}
    if name == "fill":
        _stored.append(b"x" * value)
        return {}
    if name == "modules":
        return {"value": sorted(sys.modules)}
    if name == "allocate":
        return {"value": len(bytearray(value))}
    if name == "hold":
        memory = bytearray(b"x") * value
        while memory:
            pass
    if name == "compute":
        while True:
            pass
    if name == "wait":
        os.read(os.pipe()[0], 1)
    if name == "exit":
        os._exit(value)
    if name == "end":
        os.kill(os.getpid(), value)
    raise ValueError(name)
