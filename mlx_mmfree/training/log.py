"""The log of a training run, as JSON lines, and the loss curve drawn from it."""

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

from ..evaluation.picture import COLOURS, save_picture
from ..files.json_reader import parse_json
from ..files.opening import read_member
from ..files.replacing import new_file
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


def plot_curve(log: Path, image: Path) -> bool:
    """Draws training and validation loss over tokens as PNG. Returns `False` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = read_log(log)
    size, unit = token_unit(max((r["tokens"] for r in records if "tokens" in r), default=0))
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    title = f"Loss of the run '{log.resolve().parent.name}'"
    series = (("loss", "training", "-"), ("valid_loss", "validation", "o-"))
    for colour, (key, name, style) in zip(COLOURS, series, strict=False):
        points = [
            (r["tokens"] / size, r[key]) for r in records if math.isfinite(r.get(key, math.nan))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, color=colour, markersize=4)
        if points and key == "valid_loss":
            tokens, loss = min(points, key=lambda point: point[1])
            title += f": on validation text {loss:.3f} at best, after {tokens:.3g} {unit}"
    axes.set(xlabel=f"{unit} learned from", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    save_picture(figure, image)
    return True


def token_unit(most: int) -> tuple[float, str]:
    """The unit in which numbers up to `most` have one to four digits."""
    units = {1: "tokens", 1e3: "thousand tokens", 1e6: "million tokens", 1e9: "billion tokens"}
    size = max((size for size in units if most >= 2 * size), default=1)
    return size, units[size]


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
