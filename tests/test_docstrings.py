"""The examples in the package's docstrings run as written."""

import ast
import doctest
import importlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_mmfree

ROOT = Path(mlx_mmfree.__file__).parent


def has_examples(file: Path) -> bool:
    source = file.read_text(encoding="utf-8")
    if ">>>" not in source:
        return False
    described = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, described)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    examples = (each for text in texts for each in doctest.DocTestParser().get_examples(text))
    return not all(example.options.get(doctest.SKIP) for example in examples)


MODULES = [
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.rglob("*.py"))
    if has_examples(file)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    names = {"mx": mx, "nn": nn, **vars(mlx_mmfree), **vars(module)}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0 and result.failed == 0
