"""Walks over the whole numbers of a file: each odd one is taken, or refused in one line."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.platform.resident_memory import forget_peak, peak_resident_bytes

NUMBERS = (-1, 2**31, 2**63, 10**30)
"""Numbers of no meaning, and those that 32 and 64 bits and a float do not hold."""
_MOST_SECONDS, _MOST_BYTES = 10, 500_000_000

KeyPath = tuple[str | int, ...]


def paths_of_integers(value: Any, here: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of the whole numbers in a plain value; the first two entries of a list stand for all."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value[:2])
        for key, entry in pairs:
            yield from paths_of_integers(entry, (*here, key))
    elif type(value) is int:
        yield here


def changed(value: Any, path: Sequence[str | int], number: object) -> Any:
    """A copy of a plain value with another number at a path."""
    copy = node = deepcopy(value)
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = number
    return copy


def fault(
    use: Callable[..., object], *words: object, refusals: type[Exception] = MMFreeError
) -> str:
    """The fault in how a number is taken; empty where it is taken or refused well.

    Args:
        use: Reads the number as a user would.
        words: What it is called with.
        refusals: The errors of which a user sees the message alone.
    """
    forget_peak()
    bytes_before, began = peak_resident_bytes(), time.monotonic()
    found = ""
    try:
        use(*words)
    except refusals as error:
        message = str(error)
        found = "" if 20 <= len(message) <= 2000 and "\n" not in message else f"says {message!r}"
    except Exception as error:
        found = f"ends with {type(error).__name__}: {error}"
    if (seconds := time.monotonic() - began) > _MOST_SECONDS:
        found += f" takes {seconds:.0f} s"
    if (grown := peak_resident_bytes() - bytes_before) > _MOST_BYTES:
        found += f" takes {grown / 1e6:.0f} MB"
    return found


def faults_of_file(
    file: Path, use: Callable[[], object], more: Sequence[str | KeyPath] = ()
) -> list[str]:
    """The faults of the whole numbers of a JSON file, which is as before afterwards.

    Args:
        file: The file, which holds an object or a list of objects.
        use: Reads it as a user would.
        more: Keys that get a number too; or the paths of all that do, where others would take too long.
    """
    before = file.read_text()
    values = json.loads(before)
    keys = [(key,) for key in more if isinstance(key, str) and isinstance(values, dict)]
    given = [path for path in more if not isinstance(path, str)] or paths_of_integers(values)
    found = []
    for path in dict.fromkeys([*given, *keys]):
        for number in NUMBERS:
            file.write_text(json.dumps(changed(values, path, number)))
            if fault_found := fault(use):
                found.append(f"{'.'.join(map(str, path))}: {number} {fault_found}")
    file.write_text(before)
    return found
