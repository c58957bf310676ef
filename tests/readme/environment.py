"""Finds the environment variables that source code reads."""

import ast
import re
from pathlib import Path

_ACCESSES = ("environ.get", "os.environ.get", "os.getenv", "getenv")


def names_read(folder: Path) -> set[str]:
    """The names that Python files read from the environment.

    Raises:
        AssertionError: A name cannot be distinguished from its file.
    """
    return {name for file in sorted(folder.rglob("*.py")) for name in _names(file)}


def names_in_messages(folder: Path) -> set[str]:
    """The names of our variables and of the Hub's that stand anywhere in Python files."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    return set(re.findall(r"\b(?:MLX_MMFREE_[A-Z_]+|HF_[A-Z_]+)\b", text))


def _names(file: Path) -> set[str]:
    text = file.read_text(encoding="utf-8")
    if "env" not in text:
        return set()
    tree = ast.parse(text)
    known: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = _texts(node.value)
    for node in ast.walk(tree):
        # a loop or comprehension over names
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            texts = known.get(getattr(node.iter, "id", ""), set()) | _texts(node.iter)
            known.setdefault(node.target.id, set()).update(texts)
    found = set()
    for node in ast.walk(tree):
        if (key := _key(node)) is not None:
            names = _texts(key) or known.get(getattr(key, "id", ""), set())
            assert names, f"{file.name}:{node.lineno}: {ast.unparse(node)}"
            found |= names
    return found


def _texts(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Tuple):
        return {text for element in node.elts for text in _texts(element)}
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return {node.value} if is_text else set()


def _key(node: ast.AST) -> ast.expr | None:
    """The name that is looked up, if the node looks into the environment to read."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _ACCESSES:
        return node.args[0]
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
        return node.slice
    is_membership = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
    if is_membership and ast.unparse(node.comparators[0]).endswith("environ"):
        return node.left
    return None
