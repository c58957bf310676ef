"""Reads JSON from untrusted sources.

The package `json` has no limits. Here the length of the text, the number and depth of its values and
the size of its numbers are bounded.
"""

import json
import math
import re
from collections import Counter
from typing import Any

from .opening import decode_text

MAX_BYTES = 16_000_000
MAX_VALUES = 1_000_000
MAX_DEPTH = 64
MAX_DIGITS = 40

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(
    text: bytes,
    *,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    unique_keys: bool = False,
    finite: bool = True,
) -> Any:
    """Parses one JSON value.

    Args:
        text: UTF-8 text. A byte-order mark before it does not count.
        max_bytes: The largest length of the text.
        max_values: The largest number of values; lists and objects count too.
        unique_keys: Refuse repeated keys; otherwise the last one counts.
        finite: Refuse `NaN`, `Infinity` and numbers that are read as infinity.

    Raises:
        ValueError: The text is not JSON or goes beyond a limit. The message is a clause without a
            subject, to be put after the name of the text.
    """
    if len(text) > max_bytes:
        raise ValueError(f"must have at most {max_bytes:,} bytes but has {len(text):,}")
    # each value but the first follows one of these, so that memory is bounded before it is taken
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > max_values:
        raise ValueError(f"must hold at most {max_values:,} values but has about {values:,}")
    hooks: dict[str, Any] = {"parse_int": _whole}
    if unique_keys:
        hooks["object_pairs_hook"] = _without_repeats
    if finite:
        hooks |= {"parse_float": _finite, "parse_constant": _refuse_constant}
    try:
        value = json.loads(decode_text(text), **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON but is not: {error}") from error
    except RecursionError as error:
        raise ValueError(f"must be nested at most {MAX_DEPTH} deep") from error
    _check(value, has_surrogates=_ESCAPED_SURROGATE.search(text) is not None)
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"must name each key once but repeats {name!r:.100}")
    return result


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"must have numbers of at most {MAX_DIGITS} digits but got {digits:.20}…")
    return int(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"must have finite numbers but got {text:.40}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"must have finite numbers but got {name}")


def _check(value: Any, *, has_surrogates: bool) -> None:
    """Refuses values that are nested too deeply, and texts that cannot be encoded as UTF-8."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        if has_surrogates and any(map(_has_surrogate, level)):
            raise ValueError("must hold valid Unicode but has half of a surrogate pair")
        entries = (
            entry for part in level for entry in (part.values() if isinstance(part, dict) else part)
        )
        level = [entry for entry in entries if isinstance(entry, (dict, list))]
        if not level:
            return
    raise ValueError(f"must be nested at most {MAX_DEPTH} deep")


def _has_surrogate(part: dict[str, Any] | list[Any]) -> bool:
    values = (*part, *part.values()) if isinstance(part, dict) else part
    return any(isinstance(text, str) and _LONE_SURROGATE.search(text) for text in values)
