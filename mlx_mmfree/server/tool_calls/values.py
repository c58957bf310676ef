"""Values of arguments: their types where a model writes them as plain text, and their schemas."""

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import ge, gt, le, lt
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from ...files.reading import parse_json

_MOST_STEPS, _MOST_DEPTH = 20_000, 64
_KINDS = ("string", "number", "boolean", "null", "object", "array")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is no JSON.
    """
    return parse_json(text.encode("utf-8", "replace"))


class Value:
    """The schema of one value, such as an argument of a function.

    Args:
        schema: The schema; `None` where nothing is known of the value.
        root: The schema that references begin at.

    Attributes:
        is_string: Whether strings are allowed and nothing else is.
        may_be_string: Whether strings are allowed.

    Example:
        >>> optional = Value({"anyOf": [{"type": "string"}, {"type": "null"}]})
        >>> optional.written("12345"), optional.written("null")
        ('"12345"', 'null')
    """

    def __init__(self, schema: Any, root: Any = None):
        self._schema = schema
        self._root = schema if root is None else root
        allowed = [kind for kind in _KINDS if self._allows(schema, kind)]
        self.is_string = allowed == ["string"]
        self.may_be_string = "string" in allowed
        self._is_free = len(allowed) == len(_KINDS)

    def written(self, text: str) -> str:
        """The JSON of a value that is written as plain text.

        It stays a string where one is allowed and the text is not plainly of another allowed type.
        """
        string = json.dumps(text, ensure_ascii=False)
        word = text.strip()
        if not self.may_be_string or self._is_free:
            word = _PYTHON_WORDS.get(word, word)
        try:
            value = parsed(word)
        except ValueError:
            return string
        if not self.may_be_string:
            return word
        is_other = not isinstance(value, str) and self._fits_type(value)
        return word if is_other else string

    def fits(self, value: Any) -> bool:
        """Returns whether a value follows the schema."""
        try:
            return _Walk(self._root, _follows).fits(self._schema, value)
        except _TooMuchError:
            return False

    def _fits_type(self, value: Any) -> bool:
        try:
            return _Walk(self._root, _has_type).fits(self._schema, value)
        except _TooMuchError:
            return False

    def _allows(self, schema: Any, kind: str) -> bool:
        try:
            return _Walk(self._root, _allows_kind).fits(schema, kind)
        except _TooMuchError:
            return True


class _TooMuchError(Exception):
    """A schema that takes too long to compare with, or goes round in circles."""


Rule = Callable[["_Walk", Mapping[str, Any], Any], bool]


class _Walk:
    """Compares one value with a schema and what it refers to.

    Args:
        root: Where references begin.
        rule: What a schema asks of a value by itself.
    """

    def __init__(self, root: Any, rule: Rule):
        self._root = root
        self._rule = rule
        self._steps = self._depth = 0

    def fits(self, schema: Any, value: Any) -> bool:
        """Returns whether a value is what a schema asks for."""
        if not isinstance(schema, Mapping):
            return schema is not False
        self._steps += 1
        self._depth += 1
        if self._steps > _MOST_STEPS or self._depth > _MOST_DEPTH:
            raise _TooMuchError
        try:
            return self._fits(schema, value)
        finally:
            self._depth -= 1

    def _fits(self, schema: Mapping[str, Any], value: Any) -> bool:
        if not self._rule(self, schema, value):
            return False
        if isinstance(reference := schema.get("$ref"), str) and not self.fits(
            _referred(self._root, reference), value
        ):
            return False
        if not all(self.fits(part, value) for part in _list(schema, "allOf")):
            return False
        if (parts := _list(schema, "anyOf")) and not any(self.fits(p, value) for p in parts):
            return False
        parts = _list(schema, "oneOf")
        return not parts or any(self.fits(part, value) for part in parts)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _referred(root: Any, reference: str) -> Any:
    """The target of a reference within a schema; any value where there is no such thing."""
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if key:
            found = found.get(key, {}) if isinstance(found, Mapping) else {}
    return found


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds: dict[Any, str] = {str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "number")


def _same(a: Any, b: Any) -> bool:
    return _kind_of(a) == _kind_of(b) and bool(a == b)


def _types(schema: Mapping[str, Any]) -> list[Any]:
    given = schema.get("type")
    return given if isinstance(given, list) else [] if given is None else [given]


def _choices(schema: Mapping[str, Any]) -> list[list[Any]]:
    """The lists of values of which one must be met."""
    const = [[schema["const"]]] if "const" in schema else []
    return [*const, *([_list(schema, "enum")] if "enum" in schema else [])]


def _allows_kind(walk: _Walk, schema: Mapping[str, Any], kind: str) -> bool:
    """Returns whether a schema allows any value of a kind."""
    names = {kind, "integer"} if kind == "number" else {kind}
    types = _types(schema)
    if types and not names.intersection(map(str, types)):
        return False
    return all(any(_kind_of(each) == kind for each in choice) for choice in _choices(schema))


def _has_type(walk: _Walk, schema: Mapping[str, Any], value: Any) -> bool:
    """Returns whether a value has an allowed type, or is one of those that are named."""
    names = [_kind_of(value)]
    if names == ["number"] and math.floor(value) == value:
        names.append("integer")
    types = _types(schema)
    if types and not any(name in types for name in names):
        return False
    return all(any(_same(value, each) for each in choice) for choice in _choices(schema))


def _follows(walk: _Walk, schema: Mapping[str, Any], value: Any) -> bool:
    """Returns whether a value follows all that a schema asks for."""
    if not _has_type(walk, schema, value):
        return False
    match _kind_of(value):
        case "string":
            pattern = schema.get("pattern")
            is_found = not isinstance(pattern, str) or _searches(pattern, value)
            return is_found and _is_between(schema, "Length", len(value))
        case "number":
            return _is_in_range(schema, value)
        case "array":
            return _is_between(schema, "Items", len(value)) and _items_fit(walk, schema, value)
        case "object":
            is_between = _is_between(schema, "Properties", len(value))
            return is_between and _properties_fit(walk, schema, value)
        case _:
            return True


def _is_between(schema: Mapping[str, Any], what: str, count: int) -> bool:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    return (least is None or count >= least) and (most is None or count <= most)


_BOUNDS = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}


def _is_in_range(schema: Mapping[str, Any], value: float) -> bool:
    for name, compare in _BOUNDS.items():
        bound: Any = schema.get(name)
        if _kind_of(bound) == "number" and not compare(value, bound):
            return False
    divisor = schema.get("multipleOf")
    return not divisor or math.isclose(value / divisor, round(value / divisor), rel_tol=1e-12)


def _items_fit(walk: _Walk, schema: Mapping[str, Any], value: list[Any]) -> bool:
    first = _list(schema, "prefixItems")
    pairs = zip(first, value, strict=False)
    rest = schema.get("items", True)
    return all(walk.fits(*pair) for pair in pairs) and all(
        walk.fits(rest, item) for item in value[len(first) :]
    )


def _properties_fit(walk: _Walk, schema: Mapping[str, Any], value: dict[str, Any]) -> bool:
    if any(key not in value for key in _list(schema, "required")):
        return False
    known, more = schema.get("properties"), schema.get("additionalProperties", True)
    known = known if isinstance(known, Mapping) else {}
    patterns = schema.get("patternProperties")
    patterns = patterns if isinstance(patterns, Mapping) else {}
    for key, item in value.items():
        rules = [known[key]] if key in known else []
        rules += [rule for pattern, rule in patterns.items() if _searches(pattern, key)]
        if not all(walk.fits(rule, item) for rule in rules or [more]):
            return False
    return True


@lru_cache(64)
def _searcher(pattern: str) -> SchemaValidator:
    # an engine whose time grows with the length of the text alone
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def check_pattern(pattern: str) -> None:
    """Refuses a pattern that no text can be compared with.

    Raises:
        ValueError: It is one.
    """
    try:
        _searcher(pattern)
    except SchemaError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _searches(pattern: str, text: str) -> bool:
    """Returns whether a pattern is found in a text."""
    try:
        _searcher(pattern).validate_python(text)
    except (ValidationError, SchemaError):
        return False
    return True


def patterns(schema: Any) -> list[str]:
    """All patterns of strings in a schema."""
    found, left = [], [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("pattern"), str):
                found.append(part["pattern"])
            left += part.values()
        elif isinstance(part, list):
            left += part
    return found
