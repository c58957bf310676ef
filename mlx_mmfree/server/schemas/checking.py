"""Turns the body of a request into a checked object, and says what is wrong with it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ...files.reading import parse_json
from ..errors import RequestError

_MAX_SHOWN = 60
_LONGEST_NAME = 100


class Body(BaseModel):
    """A part of a request: every name is known, and every value has its own type.

    Attributes:
        neutral: Names that other servers know, with the values that ask for nothing. Any other value
            is refused by name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}


B = TypeVar("B", bound=Body)


def checked_body(kind: type[B], text: bytes, max_bytes: int) -> B:
    """The body of a request.

    Args:
        kind: What it must look like.
        text: The body as it came.
        max_bytes: The largest length of the text.

    Raises:
        RequestError: It is not JSON, lacks a parameter, or has one that is wrong or unknown.
    """
    try:
        value = parse_json(text, max_bytes=max_bytes, unique_keys=True)
    except ValueError as error:
        raise RequestError(f"[request] the body {error}.") from error
    if not isinstance(value, dict):
        raise RequestError(f"[request] the body must be a JSON object but is {_shown(value)}.")
    # as in OpenAI's interface, null is the same as nothing
    known = {name: item for name, item in value.items() if item is not None}
    for name, allowed in kind.neutral.items():
        if name in known and not _is_one_of(known.pop(name), allowed):
            raise _unsupported(name, allowed)
    for name in value:
        if name not in kind.model_fields and name not in kind.neutral:
            raise _unknown(name)
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _refusal(error) from error


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    return any(value == other and type(value) is type(other) for other in allowed)


def _unsupported(name: str, allowed: Sequence[Any]) -> RequestError:
    values = "".join(f" or be {_shown(value)}" for value in allowed)
    return RequestError(
        f"[request] this server does not support '{name}'. It must be left out{values}.",
        param=name,
        code="unsupported_parameter",
    )


def _unknown(name: str) -> RequestError:
    name = name[:_LONGEST_NAME]
    return RequestError(
        f"[request] {name!r} must be left out, since this server does not know it.",
        param=name,
        code="unknown_parameter",
    )


def _refusal(error: ValidationError) -> RequestError:
    """What the first mistake is, by the name of the parameter."""
    first = error.errors(include_url=False)[0]
    name = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown(name)
    if first["type"] == "missing":
        return RequestError(
            f"[request] '{name}' must be given but is missing.",
            param=name,
            code="missing_required_parameter",
        )
    rule = re.sub(r"^(Value error, |Input )", "", first["msg"])
    rule = re.sub(r"^(should|must) ", "must ", rule)
    return RequestError(
        f"[request] '{name}' {rule} but got {_shown(first['input'])}.",
        param=name,
        code="invalid_value",
    )


def _place(location: tuple[int | str, ...]) -> str:
    """The name of a parameter, such as `messages[0].role`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")[:_LONGEST_NAME]


def _shown(value: Any) -> str:
    """A value as JSON writes it, short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"{value!r:.{_MAX_SHOWN}}"
