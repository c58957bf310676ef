"""The tests that show what newcomers are promised exist."""

import ast

import pytest

from tests.newcomer.promises import PROMISES, ROOT

TESTS = [test for tests in PROMISES.values() for test in tests]


@pytest.mark.parametrize("test", TESTS)
def test_each_exists(test: str) -> None:
    file, *names = test.partition("[")[0].split("::")
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    defined = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert {*names} <= defined and any(name.startswith("test_") for name in defined)
