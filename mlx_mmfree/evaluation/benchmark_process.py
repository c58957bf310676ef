"""Runs a measurement in a fresh process, which has memory, threads and caches of its own."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from .benchmark_record import Record

_TASKS = {
    "products": "benchmark_products",
    "model": "benchmark_models",
    "training": "benchmark_training",
    "llama.cpp": "benchmark_llama",
}


def measure(task: str, arguments: dict[str, Any], threads: int) -> tuple[list[Record], dict]:
    """Runs a task in a new process and returns its records and its notes.

    Args:
        task: `products`, `model`, `training` or `llama.cpp`.
        arguments: The arguments of the function `run` of the task's module, as JSON values.
        threads: Number of threads that compute in the process.

    Raises:
        RuntimeError: The process failed. The message holds the end of its output.
    """
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps({"task": task, "arguments": arguments}),
        env=child_environment(threads),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(
            f"[bench] the measurement of {task} ended with status {process.returncode}: "
            f"{process.stderr[-2000:]}"
        )
    return read_result(process.stdout.splitlines()[-1])


def child_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of a process that imports what this one can, with a number of threads."""
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if threads is not None:
        variables |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(threads))
    return os.environ | variables


def read_result(text: str) -> tuple[list[Record], dict]:
    """The records and notes that a process has printed as JSON."""
    found = json.loads(text)
    records = [
        Record(**r | {name: tuple(r[name]) for name in ("seconds", "limit_seconds")})
        for r in found["records"]
    ]
    return records, found["notes"]


def run_task(task: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Runs a task in this process. Its arguments are those of `measure`."""
    module = importlib.import_module(f"{__package__}.{_TASKS[task]}")
    records, notes = module.run(**arguments)
    return {"records": [asdict(record) for record in records], "notes": notes}


if __name__ == "__main__":
    print(json.dumps(run_task(**json.loads(sys.stdin.read()))))
