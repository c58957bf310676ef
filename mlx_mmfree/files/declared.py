"""Classes whose fields are declared once: a field's words stand beside its default and its rules.

The words are the `Attributes` of the class's documentation.
"""

import inspect
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any


def declare(words: str, default: Any = MISSING, *, factory: Any = MISSING, **rules: Any) -> Any:
    """A field of a dataclass that is a `Declared`.

    Args:
        words: What the field is.
        default: Its value where none is given; left out: one must be.
        factory: Makes the default.
        rules: What else its class asks of it, as its `metadata`.
    """
    rules["words"] = words
    if factory is not MISSING:
        return field(default_factory=factory, metadata=rules)
    return field(default=default, metadata=rules)


class Declared:
    """The base of dataclasses whose fields are made by `declare`.

    A subclass that gives such a field another default writes `name: type = default`.
    """

    def __init_subclass__(cls) -> None:
        inherited: dict[str, Field[Any]] = {}
        for base in reversed(cls.__mro__[1:]):
            if is_dataclass(base):
                inherited |= {each.name: each for each in fields(base)}
        for name in inherited.keys() & vars(cls).keys():
            value, before = vars(cls)[name], inherited[name]
            if not isinstance(value, Field):
                value = field(default=value, metadata=before.metadata)
                setattr(cls, name, value)
            value.kw_only = before.kw_only
        own = {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        words = {n: e.metadata["words"] for n, e in {**inherited, **own}.items() if e.metadata}
        if words:
            text, *rest = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")
            listed = "\n".join(f"    {name}: {each}" for name, each in words.items())
            cls.__doc__ = f"{text}\n\nAttributes:\n{listed}" + "".join(rest)
