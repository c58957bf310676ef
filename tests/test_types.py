"""Types of public functions: mypy finds each wrong call in a file of such calls."""

import inspect
import subprocess
import sys
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest

import mlx_mmfree
from tests.public_names import PublicName, packages, public_names

FUNCTIONS = [
    name
    for package in packages()
    for name in public_names(package)
    if inspect.isfunction(name.value)
]
UNKNOWN = 'Unexpected keyword argument "nonsense"'
WRONG_TYPE = 'has incompatible type "object"'


def _wrong_calls(function: PublicName) -> list[tuple[str, str]]:
    """A call with an unknown argument and, for each argument, one in which it has a wrong type.

    Each comes with words of the error.
    """
    name = f"{function.package}.{function.name}"
    parameters = inspect.signature(function.value).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    calls = [] if takes_any else [(f"{name}(nonsense=True)", UNKNOWN)]
    for number, each in enumerate(parameters):
        if each.annotation not in (typing.Any, object):
            is_named = each.kind is each.KEYWORD_ONLY
            before = f"{each.name}=" if is_named else "_any, " * number
            calls.append((f"{name}({before}object())", WRONG_TYPE))
    return calls


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_wrong_calls_are_found(tmp_path: Path) -> None:
    assert {"load", "load_model", "generate"} <= {function.name for function in FUNCTIONS}
    calls = [call for function in FUNCTIONS for call in _wrong_calls(function)]
    calls.append(('mlx_mmfree.load("x", 3, nonsense=True, packd=False)', UNKNOWN))
    calls.append(('mlx_mmfree.generate(1, 2, max_token="a")', 'has incompatible type "int"'))
    modules = sorted({function.package for function in FUNCTIONS})
    head = [*(f"import {module}" for module in modules), "import typing", "_any: typing.Any = None"]
    file = tmp_path / "wrong_calls.py"
    file.write_text("\n".join([*head, *(call for call, _ in calls)]) + "\n")
    root = Path(mlx_mmfree.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--config-file", root / "pyproject.toml", file]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500)
    errors = [line for line in found.stdout.splitlines() if f"{file.name}:" in line]
    missed = [
        call
        for number, (call, words) in enumerate(calls, len(head) + 1)
        if not any(f":{number}: error" in error and words in error for error in errors)
    ]
    assert not missed, found.stderr
