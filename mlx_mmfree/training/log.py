"""What a run reports: the lines of its log, and whom else it tells."""

import json
import math
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..files.reading import parse_json, read_member
from ..files.writing import new_file
from ..hub.checkpoint.save import write_tensors
from ..platform.threads import thread_count
from ..version import __version__
from .run_folder import learned, writing

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


class Callback:
    """Is called by the loop. A method does nothing unless it is overridden."""

    def on_begin(self, step: int) -> None:
        """Is called before all else, with 0 in a new run or with the step of the checkpoint."""

    def on_train(self, record: Mapping[str, Any]) -> None:
        """Takes a record of training: step, tokens, loss, learning rate, speed and memory."""

    def on_validation(self, record: Mapping[str, Any]) -> None:
        """Takes a record of a validation."""

    def on_best(self, step: int) -> None:
        """Is called when the model has its best validation loss so far."""

    def on_save(self, step: int) -> None:
        """Is called before a checkpoint is written, with the step that it is of."""

    def on_end(self) -> None:
        """Is called when the run ends, is stopped or fails, unless `on_begin` failed."""


class BestWeights(Callback):
    """Keeps what the model has learned at the best validation loss in a file.

    Args:
        model: The model that is trained.
        file: The file, which better weights replace.
        has_validation: Whether validation picks the best weights. Without it, the latest are the best.
    """

    def __init__(self, model: nn.Module, file: Path, has_validation: bool = True):
        self._model = model
        self._file = file
        self._has_validation = has_validation

    def on_best(self, step: int) -> None:
        with writing(self._file.parent), new_file(self._file) as new:
            write_tensors(new, learned(self._model))

    def on_save(self, step: int) -> None:
        if not self._has_validation:
            self.on_best(step)
