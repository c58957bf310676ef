"""Images a second of models of images, in fresh processes in turn, beside timm if wanted."""

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..errors import MeasurementError
from ..hub import open_checkpoint, save_model
from ..models.parts.architecture import find_described, known_variants
from .benchmark_process import check_ending, child_environment

OWN, TIMM = "mlx_mmfree", "timm"
_TASKS = {OWN: "benchmark_images_own", TIMM: "benchmark_images_timm"}
_MOST_DIFFERENCE = 1e-3
"""The largest difference of logits, of the largest logit, that still counts as the same model."""

WARM_UP = 2
"""Passes that are not timed: they start threads and touch memory for the first time."""


@dataclass(frozen=True)
class ImageSettings:
    """How much is measured.

    Attributes:
        batch_sizes: Images at a time.
        threads: Numbers of threads.
        processes: Fresh processes for each program, which take turns.
        rounds: Passes that are timed in each process.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    threads: tuple[int, ...] = (1, 2)
    processes: int = 3
    rounds: int = 10


@dataclass(frozen=True)
class Run:
    """What one process measured.

    Attributes:
        seconds: Of each pass, by the number of images at a time.
        logits: Of the first image.
    """

    seconds: dict[str, list[float]]
    logits: list[float]


@dataclass(frozen=True)
class ImageFigure:
    """The rate of one program.

    Attributes:
        model: The name that was asked for.
        program: `OWN` or `TIMM`.
        threads: Number of threads.
        batch_size: Images at a time.
        images_per_second: In the median pass of all processes.
        best: In the fastest pass.
    """

    model: str
    program: str
    threads: int
    batch_size: int
    images_per_second: float
    best: float


def benchmark_images(
    models: Sequence[str], programs: Sequence[str], settings: ImageSettings
) -> Iterator[ImageFigure]:
    """Measures the programs in turn, for one model and number of threads after the other.

    Args:
        models: Names of variants, which get random weights, or checkpoints of models of images.
        programs: `OWN`, and `TIMM` if wanted. Both read the same files.
        settings: How much is measured.

    Raises:
        MeasurementError: A process failed, or timm's logits differ.
        CheckpointError, DownloadError, UnsupportedModelError: A checkpoint cannot be read.
    """
    for model in models:
        with _checkpoint(model) as folder:
            for threads in settings.threads:
                runs: dict[str, list[Run]] = {program: [] for program in programs}
                for _ in range(settings.processes):
                    for program in programs:
                        runs[program].append(_measure(program, folder, settings, threads))
                if TIMM in runs:
                    _check_same(model, runs[OWN][0].logits, runs[TIMM][0].logits)
                for batch_size in settings.batch_sizes:
                    for program in programs:
                        yield _figure(model, program, threads, batch_size, runs[program])


def images(count: int, size: Sequence[int], channels: int) -> np.ndarray:
    """Prepared images `(B, H, W, C)`, the same in every program."""
    drawn = np.random.default_rng(0).standard_normal((count, *size, channels))
    return drawn.astype(np.float32)


@contextmanager
def _checkpoint(model: str) -> Iterator[Path]:
    """The folder of a checkpoint, which is made of random weights where a variant is named."""
    if model not in known_variants():
        yield open_checkpoint(model).folder
        return
    with tempfile.TemporaryDirectory() as parent:
        config = {"architecture": model, "num_classes": 1000}
        architecture = find_described(config)
        folder = Path(parent, "model")
        save_model(folder, architecture.build(architecture.config.from_hub(config)))
        yield folder


def _measure(program: str, folder: Path, settings: ImageSettings, threads: int) -> Run:
    arguments = {"folder": str(folder), "settings": asdict(settings), "threads": threads}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps({"program": program, **arguments}),
        env=child_environment(threads),
        capture_output=True,
        text=True,
        check=False,
    )
    check_ending(f"the measurement of {program}", process.returncode, process.stderr)
    return Run(**json.loads(process.stdout.splitlines()[-1]))


def _check_same(model: str, own: Sequence[float], other: Sequence[float]) -> None:
    most = np.abs(other).max()
    difference = np.abs(np.subtract(own, other)).max()
    # written so that NaN fails too
    if not difference <= _MOST_DIFFERENCE * most:
        raise MeasurementError(
            f"[bench] the logits of {model} must be timm's but differ by {difference:.3g}, where the "
            f"largest is {most:.3g}. Their speed cannot be compared."
        )


def _figure(
    model: str, program: str, threads: int, batch_size: int, runs: Sequence[Run]
) -> ImageFigure:
    seconds = [second for run in runs for second in run.seconds[str(batch_size)]]
    rates = batch_size / median(seconds), batch_size / min(seconds)
    return ImageFigure(model, program, threads, batch_size, *rates)


def run_program(
    program: str, folder: str, settings: dict[str, Any], threads: int
) -> dict[str, Any]:
    """Times a program in this process. The arguments are JSON values."""
    module = importlib.import_module(f"{__package__}.{_TASKS[program]}")
    return asdict(module.run(Path(folder), ImageSettings(**settings), threads))


if __name__ == "__main__":
    print(json.dumps(run_program(**json.loads(sys.stdin.read()))))
