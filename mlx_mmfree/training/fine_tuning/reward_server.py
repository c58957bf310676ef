"""Runs a user's file of reward functions, in a process that the run ends when it lasts too long.

The file is the user's own code, so that it may do what the user may. What it prints goes to stderr.
"""

import asyncio
import inspect
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...platform.confinement.frames import MOST_BYTES, receive, send

_COMPLETIONS, _STATE = "completions", "trainer_state"
_MOST_WORDS = 300

Reward = Callable[..., Any]


def main(file: str) -> None:
    """Answers requests on standard input's socket: with the names of functions, then with rewards."""
    connection = socket.socket(fileno=os.dup(0))
    # what the file prints is no answer
    os.dup2(2, 1)
    functions: dict[str, Reward] = {}
    # asynchronous functions may keep connections from one step to the next
    with suppress(EOFError, OSError), asyncio.Runner() as runner:
        send(connection, _answered(file, _load, file, functions))
        while True:
            request = json.loads(receive(connection, MOST_BYTES))
            function = functions[request["function"]]
            send(connection, _answered(file, _rewards, function, request["values"], runner))


def _answered(file: str, act: Callable[..., Any], *arguments: Any) -> bytes:
    """The result of a call, or why it failed, as JSON."""
    try:
        return json.dumps({"answer": act(*arguments)}).encode()
    except BaseException as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        words = " ".join(str(error).split())[:_MOST_WORDS]
        where = f" in line {lines[-1]}" if lines else ""
        return json.dumps({"failure": f"raised {type(error).__name__}{where}: {words}"}).encode()


def _load(file: str, functions: dict[str, Reward]) -> list[str]:
    """Runs the file, and finds the functions of completions, whose names do not begin with `_`."""
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(f"rewards_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name, value in vars(module).items():
        if name[0] != "_" and _takes_completions(value) and value not in functions.values():
            functions[name] = value
    return list(functions)


def _takes_completions(value: Any) -> bool:
    if not callable(value) or inspect.isclass(value):
        return False
    try:
        return _COMPLETIONS in inspect.signature(value).parameters
    # some functions in C have no signature
    except (TypeError, ValueError):
        return False


def _rewards(
    function: Reward, values: dict[str, Any], runner: asyncio.Runner
) -> list[float | None]:
    """The rewards of some answers, from the values that the function takes."""
    values[_STATE] = SimpleNamespace(**values[_STATE])
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        names = {each.name for each in parameters}
        values = {name: value for name, value in values.items() if name in names}
    rewards = function(**values)
    if inspect.iscoroutine(rewards):
        rewards = runner.run(rewards)
    # numbers of NumPy too
    return [None if reward is None else float(reward) for reward in rewards]


if __name__ == "__main__":
    main(sys.argv[1])
