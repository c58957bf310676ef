"""Reads and checks the values of a Hub configuration, which is untrusted input."""

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

_MISSING = object()


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key, default)
    if value is _MISSING:
        raise CheckpointError(f"[config.json] '{key}' must be given but is missing.")
    return value


def integer(
    config: Mapping[str, Any], key: str, default: Any = _MISSING, *, low: int = 1, high: int = 2**20
) -> int:
    """The whole number under `key`, within bounds that no real model leaves."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise CheckpointError(
            f"[config.json] '{key}' must be a whole number from {low} to {high} but got {value!r}."
        )
    return value


def number(
    config: Mapping[str, Any], key: str, default: Any = _MISSING, *, low: float, high: float
) -> float:
    """The finite number under `key` within `[low, high]`."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(
            f"[config.json] '{key}' must be a number from {low} to {high} but got {value!r}."
        )
    return float(value)


def boolean(config: Mapping[str, Any], key: str, default: Any = _MISSING) -> bool:
    """The truth value under `key`."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"[config.json] '{key}' must be true or false but got {value!r}.")
    return value
