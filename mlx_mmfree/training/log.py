"""The log of a training run as JSON lines, what stands in it, and its loss curve."""

import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files.replacing import new_file
from ..platform.threads import thread_count
from ..version import __version__
from .run_folder import writing


class RunLog:
    """Appends records to `log.jsonl`; after a resume, those past the resumed step are dropped.

    Args:
        path: The file; `None` keeps nothing.
        step: The step the run starts at.

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
    """The records of a log; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def plot_curve(log: Path, image: Path) -> bool:
    """Draws training and validation loss over tokens as PNG; `False` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    records = read_log(log)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label in (("loss", "training"), ("valid_loss", "validation")):
        points = [(r["tokens"] / 1e6, r[key]) for r in records if key in r]
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=label)
    axes.set(xlabel="million tokens", ylabel="nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    with writing(image.parent), new_file(image) as new:
        figure.savefig(new, dpi=120)
    plt.close(figure)
    return True


class Clock:
    """Learned tokens a second since the last report, without the time of validations."""

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
    """What a run's figures depend on beside its settings."""
    return {
        "mlx_version": version("mlx"),
        "library_version": __version__,
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "threads": thread_count(),
    }
