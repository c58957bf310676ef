"""Runs a measurement in a fresh process, which has memory, threads and caches of its own."""

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import MeasurementError, MMFreeError
from .benchmark_record import Record

_TASKS = {
    "products": "benchmark_products",
    "model": "benchmark_models",
    "training": "benchmark_training",
    "llama.cpp": "benchmark_llama",
    "mixer": "benchmark_mixer_cell",
    "mixer rates": "benchmark_mixer_rates",
}
_MAX_MESSAGE = 1000
_SHORT_MEMORY: dict[int, str] = {
    signal.SIGKILL: ", which the system sends when memory is short",
    signal.SIGSEGV: ", as MLX's processes on a CPU do when memory is short",
}


def measure(
    task: str, arguments: dict[str, Any], threads: int, seconds: float | None = None
) -> tuple[list[Record], dict]:
    """Runs a task in a new process and returns its records and its notes.

    Args:
        task: A key of `_TASKS`.
        arguments: The arguments of the function `run` of the task's module, as JSON values.
        threads: Number of threads that compute in the process, 0 on a GPU.
        seconds: The most that the process may take; `None`: as long as it needs.

    Raises:
        MeasurementError: The task failed, or its process ended before.
        TimeoutError: The process took longer, and was ended.
    """
    try:
        process = _run(task, arguments, threads, seconds)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"[bench] the measurement of {task} took over {seconds:g} s.") from error
    check_ending(f"the measurement of {task}", process.returncode, process.stderr)
    return read_result(process.stdout.splitlines()[-1])


def _run(
    task: str, arguments: dict[str, Any], threads: int, seconds: float | None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps({"task": task, "arguments": arguments}),
        env=child_environment(threads or None),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def check_ending(what: str, status: int, errors: str) -> None:
    """Checks how a process has ended.

    Args:
        what: What it was for.
        status: Its status as `subprocess` tells it.
        errors: What it wrote to standard error.

    Raises:
        MeasurementError: It did not end well. The message holds the last line of `errors`.
    """
    if not status:
        return
    ending = f"status {status}" if status > 0 else f"the signal {signal.Signals(-status).name}"
    ending += _SHORT_MEMORY.get(-status, "")
    lines = errors.strip().splitlines() or ["It did not say why."]
    raise MeasurementError(f"[bench] {what} ended with {ending}. {lines[-1][:_MAX_MESSAGE]}")


def child_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of a process that imports what this one can, with a number of threads."""
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if threads is not None:
        variables |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(threads))
    return os.environ | variables


def read_result(text: str) -> tuple[list[Record], dict]:
    """The records and notes that a process has printed as JSON.

    Raises:
        MeasurementError: It has printed why the task failed.
    """
    found = json.loads(text)
    if "failure" in found:
        raise MeasurementError(found["failure"])
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


def result_or_failure(task: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of `run_task`, or one line on why it failed, under `failure`."""
    try:
        return run_task(task, arguments)
    except MMFreeError as error:
        return {"failure": str(error)}
    except Exception as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        what = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}"
        reason = " ".join(str(error).split())[:_MAX_MESSAGE]
        return {"failure": f"[bench] the measurement of {task} failed: {what}: {reason}"}


if __name__ == "__main__":
    print(json.dumps(result_or_failure(**json.loads(sys.stdin.read()))))
