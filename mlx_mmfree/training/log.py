"""The log of a training run, as JSON lines."""

import json
import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files.reading import parse_json, read_member
from ..files.writing import new_file
from ..platform.threads import thread_count
from ..version import __version__
from .run_folder import writing

_MAX_BYTES = 1_000_000_000


class RunLog:
    """Appends records to `log.jsonl`. A resumed run drops the records after the step it resumes at.

    Args:
        path: The file; `None` writes nothing.
        step: The step that the run begins at.

    Raises:
        TrainingError: The file cannot be written.
    """

    def __init__(self, path: Path | None, step: int):
        self._path = path
        if path is None:
            return
        kept = [r for r in read_log(path) if r.get("step", 0) <= step] if step else []
        with writing(path.parent), new_file(path) as new:
            new.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record: Any) -> None:
        if self._path is None:
            return
        with writing(self._path.parent), self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, up to the first invalid line, such as one that a kill has cut short."""
    records = []
    for line in read_member(path, _MAX_BYTES).splitlines() if path.exists() else []:
        try:
            record = parse_json(line, finite=False)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def is_figure(value: Any) -> bool:
    """Whether a value of a record is a finite number, which a log from elsewhere need not hold."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    # a whole number beyond all floats
    except OverflowError:
        return False


class Clock:
    """Counts learned tokens per second since the last report, leaving out the time of validations."""

    def __init__(self) -> None:
        self.tokens = 0
        self._start = time.perf_counter()

    def rate(self) -> float:
        now = time.perf_counter()
        rate = self.tokens / (now - self._start)
        self.tokens, self._start = 0, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start


def environment() -> dict[str, Any]:
    """What the figures of a run depend on beside its settings: versions, device and threads."""
    return {
        "mlx_version": version("mlx"),
        "library_version": __version__,
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "threads": thread_count(),
    }
