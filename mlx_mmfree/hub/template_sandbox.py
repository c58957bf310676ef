"""A Jinja environment for chat templates from strangers, bounded in time, memory and reach."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from .template_limits import (
    check_entries,
    check_format,
    check_indent,
    check_join,
    check_json,
    check_percent,
    check_precision,
    check_product,
    check_replace,
    check_size,
    spend,
    weigh,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters that pass values on without turning them into text.
_STRUCTURAL = _names(
    """
    abs attr count d default dictsort first float groupby int items last length list map max
    min reject rejectattr reverse round safe select selectattr sort unique
    """
)
_TEXTUAL = _names(
    """
    capitalize e escape format indent join lower replace string title tojson trim truncate
    upper wordcount
    """
)
_STR_METHODS = _names(
    """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal
    isdigit islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
    removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith
    strip swapcase title upper
    """
)
_DICT_METHODS = frozenset(("copy", "get", "items", "keys", "values"))
_LIST_METHODS = frozenset(("copy", "count", "index"))
# What Jinja's compiler passes along with the template's own arguments.
_CALL_CONTEXT = frozenset(("_loop_vars", "_block_vars"))
# The most characters that one of a layout's characters can become.
_STRFTIME_GROWTH = 256


class RefusedMessagesError(Exception):
    """The template called ``raise_exception``."""


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "format": check_percent,
    "indent": check_indent,
    "join": check_join,
    "list": check_entries,
    "replace": check_replace,
    "round": check_precision,
    "sort": check_entries,
    "tojson": check_json,
}


def _limit_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
    check = _FILTER_CHECKS.get(name)

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        spend()
        first, values = args[:skipped], args[skipped:]
        if name in _TEXTUAL:
            if values and isinstance(values[0], Iterator):
                values = (list(values[0]), *values[1:])
            weigh(*values, *named.values())
        if check is not None:
            check(*values, **named)
        result = function(*first, *values, **named)
        if isinstance(result, str):
            check_size(len(result))
        return result

    return run


def _limit_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        spend()
        return function(*args, **named)

    return run


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any = "") -> None:
    raise RefusedMessagesError(str(message))


def _strftime_now(layout: str) -> str:
    check_size(len(layout) * _STRFTIME_GROWTH)
    return datetime.now().strftime(layout)


class _GenerationTag(Extension):
    """Accepts ``{% generation %}``, which marks what the model writes, and passes its body on."""

    tags = {"generation"}  # noqa: RUF012 (the base class's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _LimitInserter(NodeTransformer):
    """Adds calls that check the budget where templates repeat, compare or collect."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._charge(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._charge(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._charge(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return self._call("passed", [self.generic_visit(node)])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("concatenate", node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._call("passed", [node]) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._call("collected", [self.generic_visit(node)])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._call("collected", [self.generic_visit(node)])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._call("collected", [node]) if node.ctx == "load" else node

    def _charge(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = self._call("charge", [nodes.Const(characters)])
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    @staticmethod
    def _call(method: str, arguments: list[Any]) -> nodes.Node:
        function = nodes.EnvironmentAttribute(method)
        return nodes.Call(function, arguments, [], None, None)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; what they may do is limited while :func:`limited` is active."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControls, _GenerationTag],
            finalize=self._written,
        )
        self.filters["tojson"] = _to_json
        known = _STRUCTURAL | _TEXTUAL
        self.filters = {n: _limit_filter(n, f) for n, f in self.filters.items() if n in known}
        tests: dict[str, Any] = self.tests
        self.tests = {name: _limit_test(function) for name, function in tests.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _LimitInserter().visit(template)
        template.set_environment(self)
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read an attribute: a short list for each plain type."""
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, Mapping):
            return attr in _DICT_METHODS
        if isinstance(obj, (list, tuple)):
            return attr in _LIST_METHODS
        known = (Namespace, LoopContext, Macro, Cycler, Joiner, Undefined)
        return isinstance(obj, known) and super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Reads an attribute or an entry."""
        spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Reads an entry, a slice or an attribute."""
        spend()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, *args: Any, **named: Any) -> Any:
        """Calls a function or method after looking at what it would make."""
        function = getattr(obj, "__wrapped__", obj)
        owner = getattr(function, "__self__", None)
        if owner is self:
            return obj(*args)
        spend()
        given = {key: value for key, value in named.items() if key not in _CALL_CONTEXT}
        if isinstance(owner, str) and isinstance(function, BuiltinMethodType):
            if args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            if function.__name__ in ("format", "format_map"):
                check_format(owner, *args, **given)
            elif function.__name__ == "replace":
                check_replace(owner, *args)
            elif function.__name__ == "join" and args:
                check_join(args[0], owner)
        elif not isinstance(owner, (Mapping, list, tuple)):
            weigh(*args, *given.values())
        return super().call(context, obj, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes ``left operator right`` if the result stays small."""
        spend()
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
        elif operator == "+":
            weigh(left, right)
        elif operator in ("*", "**"):
            check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def passed(self, value: Any) -> Any:
        """Checks the budget and returns the value."""
        spend()
        return value

    def charge(self, characters: int) -> None:
        """Counts constant text that is about to be written."""
        spend(characters)

    def collected(self, value: Any) -> Any:
        """Returns a list, tuple or dictionary whose written form stays small."""
        spend()
        weigh(value)
        return value

    def concatenate(self, *values: Any) -> str:
        """Joins the values as text, the operator ``~``."""
        spend()
        weigh(*values)
        return "".join(map(str, values))

    def _written(self, value: Any) -> Any:
        spend(weigh(value) if isinstance(value, (Mapping, list, tuple)) else len(str(value)))
        return value
