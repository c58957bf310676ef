"""Reads YAML from untrusted sources, with limits that PyYAML's safe loader lacks."""

import re
from typing import Any

import yaml

from .reading import decode_text

MAX_BYTES = 65_536
_MAX_ALIASES = 16
_MAX_DEPTH = 32
_MAX_MESSAGE = 300
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Builds plain values that are about as large as their text.

    Aliases that hold aliases double a value with every line, so only a few are allowed. Merge keys copy
    what they name, so they are refused.
    """

    # the base class turns plain scalars into dates; here they stay text
    yaml_implicit_resolvers = {  # noqa: RUF012 (the base class's declaration)
        first: [entry for entry in entries if entry[0] != f"{_TAG}timestamp"]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._aliases = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        self._aliases += self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._aliases > _MAX_ALIASES:
            raise yaml.MarkedYAMLError(
                problem=f"there must be at most {_MAX_ALIASES} aliases but are more",
                problem_mark=mark,
            )
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"values must be nested at most {_MAX_DEPTH} deep but go deeper",
                problem_mark=mark,
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == f"{_TAG}merge":
                raise yaml.MarkedYAMLError(
                    problem="merge keys ('<<') are not read: write the entries out",
                    problem_mark=key.start_mark,
                )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in known:
                raise yaml.MarkedYAMLError(
                    problem=f"each key must stand there once but {key.value!r:.60} is repeated",
                    problem_mark=key.start_mark,
                )
            known.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor(f"{_TAG}timestamp", _text)
# 1e-5 is text in YAML 1.1, which wants a dot and a sign; it is a number in YAML 1.2 and in mlx-lm
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$", re.ASCII),
    list("-+.0123456789"),
)


class _LoaderOfWords(_Loader):
    """Reads `no`, `on` and the like as words, as YAML 1.2 does."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [entry for entry in entries if entry[0] != f"{_TAG}bool"]
        for first, entries in _Loader.yaml_implicit_resolvers.items()
    }


_LoaderOfWords.add_implicit_resolver(
    f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$", re.ASCII), list("tTfF")
)


def parse_yaml(data: bytes, *, has_words: bool = False) -> Any:
    """The value of a YAML document: dictionaries, lists, texts, numbers, true, false and None.

    Dates stay text. Of a longer text, only the first `MAX_BYTES + 1` bytes need to be given.

    Args:
        data: The document.
        has_words: Whether `yes`, `no`, `on` and `off` are words, as `no` is for Norwegian, and not true
            or false.

    Raises:
        ValueError: The text is too long or not UTF-8 YAML, repeats a key, has a merge key, or has more
            aliases or deeper nesting than files written by hand have.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it must have at most {MAX_BYTES} bytes but has more")
    try:
        text = decode_text(data)
    except ValueError as error:
        raise ValueError(f"it {error}") from error
    loader = None
    try:
        loader = (_LoaderOfWords if has_words else _Loader)(text)
        return loader.get_single_data()
    except yaml.YAMLError as error:
        message = str(error).replace('in "<unicode string>", ', "at ")
        raise ValueError(" ".join(message.split())[:_MAX_MESSAGE]) from error
    except (TypeError, RecursionError, OverflowError, LookupError, AttributeError) as error:
        # a value that does not fit its tag makes the package fail in one of these ways
        raise ValueError(f"a value does not fit its tag: {error}"[:_MAX_MESSAGE]) from error
    finally:
        if loader is not None:
            loader.dispose()
