"""Reads and checks the values of a Hub configuration, which is untrusted input."""

from collections.abc import Collection, Mapping
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError

_MISSING = object()

ACTIVATIONS: Mapping[str, str] = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""The activations of this library by their names in transformers, of which several mean the same."""


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
    # some writers of JSON give whole numbers a fraction of zero
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, bool) or not isinstance(whole, int) or not low <= whole <= high:
        raise CheckpointError(
            f"[config.json] '{key}' must be a whole number from {low} to {high} but got {value!r:.80}."
        )
    return whole


def number(
    config: Mapping[str, Any], key: str, default: Any = _MISSING, *, low: float, high: float
) -> float:
    """The finite number under `key` within `[low, high]`."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(
            f"[config.json] '{key}' must be a number from {low} to {high} but got {value!r:.80}."
        )
    return float(value)


def boolean(config: Mapping[str, Any], key: str, default: Any = _MISSING) -> bool:
    """The truth value under `key`."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"[config.json] '{key}' must be true or false but got {value!r:.80}.")
    return value


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`; empty if it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"[config.json] '{key}' must be an object but got {value!r:.100}.")
    return value


def agreed(places: Mapping[str, Any]) -> Any:
    """The value of keys that mean one thing, by their names in words; `None` if none is given.

    Raises:
        CheckpointError: Two of them have different values, of which programs take one or the other.
    """
    given = {place: value for place, value in places.items() if value is not None}
    for place, value in given.items():
        first = next(iter(given))
        if value != given[first]:
            raise CheckpointError(
                f"[config.json] {first} and {place} must be equal, since they mean the same, but got "
                f"{given[first]!r:.60} and {value!r:.60}. Correct the one that is wrong, or remove it."
            )
    return next(iter(given.values()), None)


def dtype_name(config: Mapping[str, Any]) -> Any:
    """The dtype that a configuration names under the key of today or the older one; `None`: none.

    Raises:
        CheckpointError: The two differ.
    """
    return agreed({f"'{key}'": config.get(key) for key in ("dtype", "torch_dtype")})


def activation(
    config: Mapping[str, Any], key: str, supported: Collection[str], default: str
) -> str:
    """The name under `key`, one of transformers' for an activation of `supported`.

    Raises:
        UnsupportedModelError: It names another activation.
    """
    known = [name for name, meant in ACTIVATIONS.items() if meant in supported]
    name = default if config.get(key) is None else config[key]
    if name not in known:
        raise UnsupportedModelError(
            f"[config.json] '{key}' must be {' or '.join(map(repr, known))} but got {name!r:.100}. "
            "Other values are not implemented."
        )
    return str(name)


def refuse_unless(config: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Refuses keys that change the mathematics and have another value than the supported one.

    Raises:
        UnsupportedModelError: A key is neither absent, null nor the supported value.
    """
    for key, value in supported.items():
        given = config.get(key)
        if given is not None and (
            given != value or isinstance(given, bool) != isinstance(value, bool)
        ):
            raise UnsupportedModelError(
                f"[config.json] {key!r:.100} must be {value!r} but got {given!r:.100}. Other values are "
                "not implemented."
            )


def numbers(
    config: Mapping[str, Any],
    key: str,
    count: int,
    default: Any = _MISSING,
    *,
    low: float,
    high: float,
) -> tuple[float, ...]:
    """So many numbers under `key`, each as by `number`."""
    values = _list(config, key, count, default)
    return tuple(number({key: value}, key, low=low, high=high) for value in values)


def integers(
    config: Mapping[str, Any],
    key: str,
    count: int | None = None,
    default: Any = _MISSING,
    *,
    low: int = 1,
    high: int = 2**20,
) -> tuple[int, ...]:
    """So many whole numbers under `key`, each as by `integer`; `None`: from 1 to 16 of them."""
    values = _list(config, key, count, default)
    return tuple(integer({key: value}, key, low=low, high=high) for value in values)


def _list(config: Mapping[str, Any], key: str, count: int | None, default: Any) -> list[Any]:
    values = _value(config, key, default)
    allowed = range(1, 17) if count is None else (count,)
    if not isinstance(values, list | tuple) or len(values) not in allowed:
        wanted = "1 to 16" if count is None else count
        raise CheckpointError(
            f"[config.json] '{key}' must be a list of {wanted} numbers but got {values!r:.80}."
        )
    return list(values)
