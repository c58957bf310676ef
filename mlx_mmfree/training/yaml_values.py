"""Reads a YAML file and checks its values for the fields of a settings class."""

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from ..errors import TrainingError
from ..files.reading import read_file
from ..files.yaml_text import MAX_BYTES, parse_yaml

_SHOWN_KEYS = 8


def read_mapping(path: Path, place: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Args:
        path: The file.
        place: The command that messages name.

    Raises:
        TrainingError: The file cannot be read or does not hold a mapping.
    """
    try:
        values = parse_yaml(read_file(path, MAX_BYTES))
    except (OSError, ValueError) as error:
        raise TrainingError(f"[{place}] '{path}' must be a readable YAML file: {error}") from error
    if not isinstance(values, dict):
        raise TrainingError(
            f"[{place}] '{path}' must hold a mapping but got {type(values).__name__}. Write 'name: "
            "value' on each line."
        )
    return values


def check_keys(values: dict[str, Any], settings: type, source: str, place: str) -> None:
    """Refuses keys that are not fields of a settings class.

    Args:
        values: The values by their keys.
        settings: A dataclass.
        source: Where the values come from, as messages name it.
        place: The command that messages name.

    Raises:
        TrainingError: A key is unknown.
    """
    known = [f.name for f in fields(settings) if f.name != "root"]
    if unknown := sorted(map(str, values.keys() - set(known))):
        shown = ", ".join(f"{name:.60}" for name in unknown[:_SHOWN_KEYS])
        more = f" and {len(unknown) - _SHOWN_KEYS} more" if len(unknown) > _SHOWN_KEYS else ""
        raise TrainingError(
            f"[{place}] {source} has unknown keys {shown}{more}. The known keys are {', '.join(known)}."
        )


def checked_values(values: dict[str, Any], settings: type) -> dict[str, Any]:
    """Converts the values of numeric fields, and checks the types of numbers, booleans and texts.

    Raises:
        ValueError: A value has another type. The message names its key.
    """
    types = {f.name: f.type for f in fields(settings)}
    return {name: checked(name, value, types[name]) for name, value in values.items()}


def finite(value: Any, name: str = "a number") -> float:
    """The finite number that a value of a YAML file stands for.

    Raises:
        ValueError: The value is not a number, or it is infinite or NaN.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    rule = "finite" if is_number or math.isinf(number) else "a number"
    raise ValueError(f"{name} must be {rule} but got {value!r:.80}")


def listed(value: Any, name: str) -> Sequence[Any]:
    """The entries of a list of a YAML file.

    Raises:
        ValueError: The value is not a list.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"'{name}' must be a list but got {value!r:.80}")
    return value


def names_in(value: Any, name: str) -> tuple[str, ...]:
    """The names in a list of a YAML file.

    Raises:
        ValueError: The value is not a list of texts.
    """
    for entry in listed(value, name):
        if not isinstance(entry, str):
            raise ValueError(f"'{name}' must be a list of names but holds {entry!r:.80}")
    return tuple(value)


def checked(name: str, value: Any, kind: Any) -> Any:
    """A value of a kind: a number, a boolean or a text, or perhaps `None`; others stay as they are.

    Raises:
        ValueError: The value has another type.
    """
    if NoneType in get_args(kind):
        if value is None:
            return None
        [kind] = [part for part in get_args(kind) if part is not NoneType]
    if kind is float:
        return finite(value, f"'{name}'")
    if kind is int:
        is_whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)
        if isinstance(value, bool) or not is_whole:
            raise ValueError(f"'{name}' must be a whole number but got {value!r:.80}")
        return int(value)
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"'{name}' must be true or false but got {value!r:.80}")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"'{name}' must be text but got {value!r:.80}")
    return value
