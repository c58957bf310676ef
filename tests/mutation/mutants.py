"""Makes mutants of the package: copies of a file with one small mistake of the kind that slips in.

A mistake changes one spot of the source text. Which mutants are taken depends on a hash of what each of
them changes: where code changes, mutants of it come and go, and all others stay.
"""

import ast
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path

PARTS = {
    "ops": ("ops",),
    "layers": ("layers", "token_mixers", "channel_mixers", "spatial_mixers", "models"),
    "loaders": ("hub", "tokenizer", "files", "images"),
    "training": ("training", "evaluation"),
    "server": ("server", "generation"),
}
"""Folders of the package, by what they have in common."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# the order of their arguments means nothing
_SYMMETRIC = {"max", "min", "maximum", "minimum", "isinstance", "issubclass", "gcd", "lcm"}
# a guard against mistakes of this code, not a rule
_GUARDS = {"strict"}


@dataclass(frozen=True)
class Mutant:
    """A copy of a file with a mistake.

    Attributes:
        file: The file, below the package.
        kind: What the mistake is, such as `comparison`.
        name: The file, its function, and what is replaced by what; counted where it stands again.
        lines: The first and the last line of what is replaced.
        scope: Those of the function, class or file that it belongs to.
        source: The text of the copy.
    """

    file: str
    kind: str
    name: str
    lines: tuple[int, int]
    scope: tuple[int, int]
    source: str

    @property
    def part(self) -> str:
        """The one of `PARTS` that it belongs to."""
        folder = self.file.split("/")[0]
        return next((part for part, folders in PARTS.items() if folder in folders), "")


def chosen(package: Path, count: int, seed: int) -> list[Mutant]:
    """Mutants of each part, and within it of each kind, as many as fit.

    Args:
        package: The folder of the package.
        count: How many in all.
        seed: Other seeds choose others.
    """
    found = []
    for part, folders in PARTS.items():
        files = sorted(file for name in folders for file in (package / name).rglob("*.py"))
        kinds: dict[str, list[Mutant]] = {}
        for file in files:
            for mutant in mutants(file.relative_to(package).as_posix(), file.read_text("utf-8")):
                kinds.setdefault(mutant.kind, []).append(mutant)
        by_kind = [
            sorted(kinds[kind], key=lambda each: _draw(each, seed)) for kind in sorted(kinds)
        ]
        in_turn = [each for turn in zip_longest(*by_kind) for each in turn if each is not None]
        found += in_turn[: count // len(PARTS)]
        assert len(found) % (count // len(PARTS)) == 0, part
    return found


def _draw(mutant: Mutant, seed: int) -> bytes:
    return blake2b(f"{seed} {mutant.name}".encode(), digest_size=8).digest()


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    names: dict[str, int] = {}
    for function, scope, kind, node, text in _changes(ast.parse(source)):
        begin, end = _span(source, node)
        old = source.encode()[begin:end].decode()
        name = f"{file} {function}: {' '.join(old.split())} -> {text}"
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name} ({names[name]})"
        if isinstance(node, ast.expr):
            text = f"({text})"
        changed = source.encode()[:begin] + text.encode() + source.encode()[end:]
        assert node.end_lineno is not None
        lines = node.lineno, node.end_lineno
        yield Mutant(file, kind, name, lines, scope, changed.decode())


def _span(source: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Where the text of a node begins and ends, in bytes."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (
        lines[node.lineno - 1] + node.col_offset,
        lines[node.end_lineno - 1] + node.end_col_offset,
    )


_Change = tuple[str, tuple[int, int], str, ast.expr | ast.stmt, str]


def _changes(tree: ast.Module) -> Iterator[_Change]:
    """Each possible mistake: its function and scope, its kind, what is replaced, and by what."""
    todo: list[tuple[str, tuple[int, int], ast.AST]] = [("", (1, sys.maxsize), tree)]
    while todo:
        function, scope, node = todo.pop()
        for kind, part, changed in _of_node(node):
            yield function, scope, kind, part, ast.unparse(ast.fix_missing_locations(changed))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".removeprefix(".")
            assert node.end_lineno is not None
            scope = node.lineno, node.end_lineno
        todo += [(function, scope, child) for child in reversed(_children(node))]


def _children(node: ast.AST) -> Sequence[ast.AST]:
    """The parts of a node, without types, decorators, texts and declarations."""
    left_out: set[ast.AST | None] = set()
    if _is_left_out(node):
        return ()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        left_out = {node.returns, *node.decorator_list}
    elif isinstance(node, ast.ClassDef):
        left_out = {*node.decorator_list, *node.bases}
    elif isinstance(node, ast.arg | ast.AnnAssign):
        left_out = {node.annotation}
    elif isinstance(node, ast.arguments):
        # they have a kind of their own
        left_out = {*_constants([*node.defaults, *node.kw_defaults])}
    return [child for child in ast.iter_child_nodes(node) if child not in left_out]


def _is_left_out(node: ast.AST) -> bool:
    """Returns whether nothing in it can be a mistake that a test finds."""
    match node:
        case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.FunctionDef(name="_examples"):
            # the latter has the calls that tests try
            return True
        case ast.keyword(arg=name):
            return name in _GUARDS
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


_Part = tuple[str, ast.expr | ast.stmt, ast.AST]


def _of_node(node: ast.AST) -> Iterator[_Part]:
    """The mistakes of one node: kind, what is replaced, and by what."""
    if isinstance(node, ast.Compare):
        changed = copy.deepcopy(node)
        changed.ops[0] = _COMPARISONS[type(node.ops[0])]()
        yield "comparison", node, changed
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        other = copy.deepcopy(node)
        other.op = _OPERATORS[type(node.op)]()
        yield "arithmetic", node, other
    elif isinstance(node, ast.BoolOp):
        either = copy.deepcopy(node)
        either.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "condition", node, either
    elif isinstance(node, ast.Constant) and (value := _other(node.value)) is not None:
        yield "constant", node, ast.Constant(value)
    elif isinstance(node, ast.Call) and _has_order(node):
        swapped = copy.deepcopy(node)
        swapped.args[:2] = swapped.args[1::-1]
        yield "swapped arguments", node, swapped
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", node.test, ast.UnaryOp(ast.Not(), node.test)
    elif _can_go(node):
        assert isinstance(node, ast.stmt)
        yield "removed statement", node, ast.Pass()
    if isinstance(node, ast.arguments):
        for default in _constants([*node.defaults, *node.kw_defaults]):
            if (value := _other(default.value)) is not None:
                yield "default", default, ast.Constant(value)


def _constants(nodes: Sequence[ast.expr | None]) -> list[ast.Constant]:
    return [node for node in nodes if isinstance(node, ast.Constant)]


def _other(value: object) -> bool | int | float | None:
    """Another constant of the same type, if it is a number."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return 2 * value if value else 1.0
    return None


def _has_order(call: ast.Call) -> bool:
    """Returns whether there are two positional arguments, whose order matters."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    first = call.args[:2]
    return (
        len(first) == 2
        and name not in _SYMMETRIC
        and not any(isinstance(each, ast.Starred) for each in first)
        and ast.unparse(first[0]) != ast.unparse(first[1])
    )


def _can_go(node: ast.AST) -> bool:
    """Returns whether a statement can be left out without a name that nobody has defined."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete)
