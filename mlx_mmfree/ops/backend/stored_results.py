"""Results about kernels, stored in the library's cache folder from process to process.

They hold for one device, version of the system, version of MLX and text of the operations, and lie in a
file of their own for each of these.
"""

import json
import platform
import threading
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...files.reading import parse_json, read_file
from ...files.writing import new_file
from ...platform.cache_folder import cache_folder

LOCK = threading.RLock()
"""Held by whoever reads, changes or writes results, and by whoever finds a new one."""

Sections = dict[str, dict[str, Any]]

_MAX_BYTES = 1_000_000

# of `None` where nothing is stored beyond this process
_sections: dict[Path | None, Sections] = {}


def stored(section: str) -> dict[str, Any]:
    """The stored results of a section by their names, as the file has them, to read and to change."""
    file = _file()
    if file not in _sections:
        _sections[file] = {} if file is None else _read(file)
    return _sections[file].setdefault(section, {})


def store() -> None:
    """Writes what was put into the sections."""
    file = _file()
    if file is None:
        return
    # without a folder to write to, each process finds its own results
    with suppress(OSError), new_file(file) as new:
        new.write_text(json.dumps(_sections[file], indent=1))


def variant_name(name: str, variant: dict[str, Any]) -> str:
    """A name with everything that selects a variant, for people and as a key of stored results."""
    values = ", ".join(f"{key}={value}" for key, value in variant.items())
    return f"{name}({values})".replace("mlx.core.", "")


def device_name() -> str:
    """The name of the default device."""
    return _device_name(mx.default_device().type)


@cache
def mlx_version() -> str:
    return version("mlx")


def _file() -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    facts = "\0".join((device_name(), _system_version(), mlx_version(), _text_of_operations()))
    return folder / "kernel_checks" / f"{sha256(facts.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> Sections:
    try:
        found = parse_json(read_file(file, _MAX_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: section for name, section in found.items() if isinstance(section, dict)}


@cache
def _text_of_operations() -> str:
    """A digest of the code of all kernels and of what launches them."""
    digest = sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _device_name(kind: mx.DeviceType) -> str:
    return str(mx.device_info(mx.Device(kind))["device_name"])


@cache
def _system_version() -> str:
    """The version of the system, which brings Metal's compiler, and of its build."""
    return f"{platform.mac_ver()[0]} {platform.release()} {platform.version()}"
