"""Work that the tests give to a confined process."""

import os
import sys
from typing import Any

from mlx_mmfree.platform.confinement.loop import ask_back

_kept: list[Any] = []


def handle(request: tuple[str, Any]) -> dict[str, Any]:
    """Does one chunk of work by name."""
    name, value = request
    if name == "repeat":
        return {"value": value}
    if name == "keep":
        _kept.append(value)
    if name in ("keep", "kept"):
        return {"value": _kept}
    if name == "ask":
        return {"value": [ask_back(value), ask_back(value + 1)]}
    if name == "fill":
        _kept.append(b"x" * value)
        return {}
    if name == "modules":
        return {"value": sorted(sys.modules)}
    if name == "allocate":
        return {"value": len(bytearray(value))}
    if name == "hold":
        held = bytearray(b"x") * value
        while held:
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
