"""Declares, reads and checks the fields of a Hub configuration, which is untrusted input."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

from ...errors import CheckpointError, UnsupportedModelError
from ...files.declared import Declared, declare

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


def _refused(key: str, value: Any, rule: str) -> CheckpointError:
    """The error for a value that is missing, or is not what it must be."""
    if value is MISSING:
        return CheckpointError(f"[config.json] '{key}' must be given but is missing.")
    return CheckpointError(f"[config.json] '{key}' must {rule} but got {value!r:.80}.")


def integer(
    config: Mapping[str, Any], key: str, default: Any = MISSING, *, low: int = 1, high: int = 2**20
) -> int:
    """The whole number under `key`, within bounds that no real model leaves."""
    value = config.get(key, default)
    # some writers of JSON give whole numbers a fraction of zero
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, bool) or not isinstance(whole, int) or not low <= whole <= high:
        raise _refused(key, value, f"be a whole number from {low} to {high}")
    return whole


def number(
    config: Mapping[str, Any], key: str, default: Any = MISSING, *, low: float, high: float
) -> float:
    """The finite number under `key` within `[low, high]`."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refused(key, value, f"be a number from {low} to {high}")
    return float(value)


def boolean(config: Mapping[str, Any], key: str, default: Any = MISSING) -> bool:
    """The truth value under `key`."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise _refused(key, value, "be true or false")
    return value


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`; empty if it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"[config.json] '{key}' must be an object but got {value!r:.100}.")
    return value


def agreed(values: Mapping[str, Any]) -> Any:
    """The value of keys that mean one thing, by their names as text; `None` if none is given.

    Raises:
        CheckpointError: Two of them have different values, of which programs take one or the other.
    """
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        first = next(iter(given))
        if value != given[first]:
            raise CheckpointError(
                f"[config.json] {first} and {key} must be equal, since they mean the same, but got "
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
    config: Mapping[str, Any],
    key: str,
    default: str,
    *,
    supported: Collection[str],
    as_meant: bool = False,
) -> str:
    """The name under `key`, one of transformers' for an activation of `supported`.

    With `as_meant`, the name of this library for it.

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
    return ACTIVATIONS[name] if as_meant else str(name)


def usual_word(config: Mapping[str, Any], key: str, default: str, *, among: Collection[str]) -> str:
    """Like `word`, where `null` means the default."""
    return word(config if config.get(key) is not None else {}, key, default, among=among)


def word(
    config: Mapping[str, Any], key: str, default: Any = MISSING, *, among: Collection[str]
) -> str:
    """The name under `key`, one of a few.

    Raises:
        UnsupportedModelError: It is another one.
    """
    value = config.get(key, default)
    if value is MISSING:
        raise _refused(key, value, "be a word")
    if value not in among:
        raise UnsupportedModelError(
            f"[config.json] '{key}' must be one of {', '.join(among)} but got {value!r:.100}."
        )
    return str(value)


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


def token_id(config: Mapping[str, Any], key: str, default: Any = MISSING) -> int:
    """The token under `key`, within the vocabulary."""
    return integer(config, key, default, low=0, high=integer(config, "vocab_size", high=2**24) - 1)


def numbers(
    config: Mapping[str, Any],
    key: str,
    default: Any = MISSING,
    *,
    count: int,
    low: float,
    high: float,
) -> tuple[float, ...]:
    """So many numbers under `key`, each as by `number`."""
    values = _list(config, key, count, default)
    return tuple(number({key: value}, key, low=low, high=high) for value in values)


def integers(
    config: Mapping[str, Any],
    key: str,
    default: Any = MISSING,
    *,
    count: int | None = None,
    low: int = 1,
    high: int = 2**20,
) -> tuple[int, ...]:
    """So many whole numbers under `key`, each as by `integer`; `None`: from 1 to 16 of them."""
    values = _list(config, key, count, default)
    return tuple(integer({key: value}, key, low=low, high=high) for value in values)


def _list(config: Mapping[str, Any], key: str, count: int | None, default: Any) -> list[Any]:
    values = config.get(key, default)
    allowed = range(1, 17) if count is None else (count,)
    if not isinstance(values, list | tuple) or len(values) not in allowed:
        wanted = "1 to 16" if count is None else count
        raise _refused(key, values, f"be a list of {wanted} numbers")
    return list(values)


def key(
    words: str,
    reader: Callable[..., Any],
    default: Any = MISSING,
    *,
    names: tuple[str, ...] = (),
    writer: Callable[[Any], Any] | None = None,
    is_optional: bool | None = None,
    **bounds: Any,
) -> Any:
    """Declares a field of a `HubConfig` that stands under a key of its own.

    Args:
        words: What the field is.
        reader: Reads and checks it: a function of this file, or one that is called as they are. It finds
            the fields before this one as they were read.
        default: What an absent key means; left out: it must be there.
        names: Keys that mean it, of which the first is written. Default: the name of the field.
        writer: Makes a plain value of it. Default: it is one.
        is_optional: Whether `null` means that there is none. Default: where that is the default.
        bounds: Further arguments of the reader.
    """
    optional = default is None if is_optional is None else is_optional
    read = partial(reader, **bounds)
    return declare(words, default, read=read, names=names, write=writer, is_optional=optional)


def one_of(words: str, *among: str) -> Any:
    """Declares a field that is one of a few words, the first of them by default."""
    return key(words, usual_word, among[0], among=among)


def weight_std() -> Any:
    """Declares the range of freshly made weights, which most architectures have."""
    return key("Standard deviation of freshly made weights.", number, 0.02, low=0.0, high=10.0)


@dataclass(frozen=True)
class HubConfig(Declared):
    """The base of descriptions of models, which read and write the keys of a `config.json`.

    Fields are made by `key`, or by `declare` if the class reads and writes them itself.
    """

    model_type: ClassVar[str]
    hub_class: ClassVar[str]
    """The name in `architectures`."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Keys that change the mathematics, with the value that is meant."""

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of a Hub `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        return cls(**cls.read_keys(config))

    @classmethod
    def read_keys(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that stand under keys of their own; raises as `from_hub`."""
        refuse_unless(config, cls.fixed)
        found: dict[str, Any] = {}
        for each in fields(cls):
            declared = each.metadata
            if "read" not in declared:
                continue
            name, *others = declared["names"] or (each.name,)
            given = {**config, **found}
            if others:
                value = agreed({f"'{one}'": config.get(one) for one in (name, *others)})
                given = {} if value is None else {name: value}
            is_none = declared["is_optional"] and given.get(name, each.default) is None
            found[each.name] = None if is_none else declared["read"](given, name, each.default)
        return found

    def write_keys(self) -> dict[str, Any]:
        """The plain values of these fields, by their keys."""
        found = {}
        for each in fields(self):
            declared, value = each.metadata, getattr(self, each.name)
            if "read" in declared:
                write = declared["write"]
                name = declared["names"][0] if declared["names"] else each.name
                found[name] = value if write is None or value is None else write(value)
        return found

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` that `from_hub` reads back."""
        return {
            "model_type": self.model_type,
            "architectures": [self.hub_class],
            **self.write_keys(),
        }

    def fill(self, name: str, value: Any) -> None:
        """Gives a field that has none the value that follows from others, in `__post_init__`."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)
