"""Runs a measurement without HTTP in a fresh process."""

import importlib
import json
import subprocess
import sys
from typing import Any

from ..benchmark_process import check_ending, child_environment

DIRECT, PARKED = "direct", "parked"
"""Modules of this folder with a function `run`, whose arguments and result are JSON values."""


def measure(task: str, arguments: dict[str, Any]) -> Any:
    """What a task finds in a process of its own.

    Raises:
        MeasurementError: The process failed.
    """
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps({"task": task, "arguments": arguments}),
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    check_ending(f"the measurement of {task}", process.returncode, process.stderr)
    return json.loads(process.stdout.splitlines()[-1])


def run(task: str, arguments: dict[str, Any]) -> Any:
    """Runs a task in this process."""
    return importlib.import_module(f"{__package__}.{task}").run(**arguments)


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.stdin.read()))))
