"""Measures images a second of models on a CPU, beside timm if wanted."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.flags import positive
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.cli.parts.terminal import aligned, markdown
from mlx_mmfree.errors import MeasurementError, UsageError
from mlx_mmfree.evaluation.benchmark import measure
from mlx_mmfree.files.checkpoint_files import CONFIG_FILE, WEIGHTS_FILE
from mlx_mmfree.files.reading import read_json_object
from mlx_mmfree.hub import load_model, open_checkpoint, save_model
from mlx_mmfree.models.parts.architecture import find_described, known_variants
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.platform.memory_reader import elapsed
from mlx_mmfree.platform.threads import thread_count

OWN, TIMM = "mlx_mmfree", "timm"
_FUNCTIONS = {OWN: "images:run_own", TIMM: "images:run_timm"}
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
    """The metrics of one process.

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
        models: Names of variants, which get random weights, or checkpoints of image models.
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
    return Run(**measure(_FUNCTIONS[program], arguments, threads))


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


def run_own(folder: str, settings: dict[str, Any], threads: int) -> dict[str, Any]:
    """Times passes through this library's model of a folder, for each number of images at a time."""
    amounts = ImageSettings(**settings)
    mx.set_default_device(mx.Device(mx.cpu))
    keep_freed_memory()
    model = load_model(folder, dtype=mx.float32)
    model.eval()
    config = model.config
    given = images(max(amounts.batch_sizes), config.image_size, config.input_channels)
    seconds = {}
    for batch_size in amounts.batch_sizes:
        batch = mx.array(given[:batch_size])
        compute = partial(_pass, model, batch)
        times = [elapsed(compute) for _ in range(amounts.rounds + WARM_UP)]
        seconds[str(batch_size)] = times[WARM_UP:]
    logits = np.array(model(mx.array(given[:1]))[0])
    return asdict(Run(seconds, [float(logit) for logit in logits]))


def _pass(model: Any, batch: mx.array) -> None:
    mx.eval(model(batch))


def run_timm(folder: str, settings: dict[str, Any], threads: int) -> dict[str, Any]:
    """Times passes through timm's model of a folder likewise."""
    import timm
    import torch
    from safetensors.torch import load_file

    amounts = ImageSettings(**settings)
    torch.set_num_threads(threads)
    described = read_json_object(Path(folder, CONFIG_FILE))
    config = find_described(described).config.from_hub(described)
    model = timm.create_model(
        config.architecture,
        num_classes=config.num_classes,
        **described.get("model_args", {}),
    )
    model.load_state_dict(load_file(Path(folder, WEIGHTS_FILE)))
    model.eval()
    given = images(max(amounts.batch_sizes), config.image_size, config.input_channels)
    seconds = {}
    with torch.inference_mode():
        whole = torch.from_numpy(given).permute(0, 3, 1, 2).contiguous()
        for batch_size in amounts.batch_sizes:
            batch = whole[:batch_size]
            times = [elapsed(partial(model, batch)) for _ in range(amounts.rounds + WARM_UP)]
            seconds[str(batch_size)] = times[WARM_UP:]
        logits = model(whole[:1])[0]
    return asdict(Run(seconds, logits.tolist()))


_AMOUNTS = ("batch_sizes", "threads", "processes", "rounds")
_QUICK = {"threads": (1,), "processes": 1, "rounds": 1}


def build_parser() -> CommandParser:
    parser = CommandParser(prog="images.py", description=__doc__)
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="timm's name of an architecture, measured with random weights, or folder or Hub "
        "repository of a checkpoint",
    )
    parser.add_argument(
        "--compare",
        choices=("timm",),
        help="also measure timm's model on PyTorch with the same weights and images; needs timm and "
        "torch",
    )
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", help="numbers of images at a time (1 8)"
    )
    parser.add_argument(
        "--threads", type=positive, nargs="+", help="numbers of threads (1 and all processors)"
    )
    parser.add_argument(
        "--processes",
        type=positive,
        help="number of fresh processes for each program, which take turns (3)",
    )
    parser.add_argument("--rounds", type=positive, help="passes timed in each process (10)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try the command in a short time; its numbers say nothing about speed",
    )
    format = parser.add_mutually_exclusive_group()
    format.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    format.add_argument(
        "--markdown", action="store_true", help="print a row for each model in Markdown"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.compare:
        for package in ("timm", "torch"):
            if find_spec(package) is None:
                raise UsageError(
                    f"[bench] 'compare' needs the package {package}, which is not installed. Install "
                    f"it: pip install {package}"
                )
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _AMOUNTS
        if (value := getattr(args, name)) is not None
    }
    usual: dict[str, Any] = {"threads": tuple(sorted({1, thread_count()}))}
    settings = ImageSettings(**usual | (_QUICK if args.quick else {}) | given)
    metrics = benchmark_images(args.models, [OWN, *([TIMM] if args.compare else [])], settings)
    found = list(_announced(metrics, _count(args.models, settings, bool(args.compare))))
    if args.json:
        shown = {"settings": asdict(settings), "metrics": [asdict(figure) for figure in found]}
        print(json.dumps(shown))
        return 0
    print("\n".join(markdown(_page(found)) if args.markdown else aligned(_rows(found))))
    return 0


def _count(models: Sequence[str], settings: ImageSettings, compares: bool) -> int:
    programs = 2 if compares else 1
    return len(models) * len(settings.threads) * len(settings.batch_sizes) * programs


def _announced(metrics: Iterator[ImageFigure], count: int) -> Iterator[ImageFigure]:
    """Yields the metrics with a progress bar, where stderr is a terminal."""
    with tqdm(total=count, unit="figure", disable=None, dynamic_ncols=True) as bar:
        for figure in metrics:
            bar.update()
            yield figure


def _groups(metrics: Sequence[ImageFigure]) -> dict[tuple[str, int, int], dict[str, ImageFigure]]:
    """The metrics of each model, number of threads and of images, by their programs."""
    groups: dict[tuple[str, int, int], dict[str, ImageFigure]] = {}
    for figure in metrics:
        key = (figure.model, figure.threads, figure.batch_size)
        groups.setdefault(key, {})[figure.program] = figure
    return groups


def _page(metrics: Sequence[ImageFigure]) -> list[list[str]]:
    """A row for each model: images a second, and in brackets their share of timm's."""
    columns: dict[str, None] = {}
    rows: dict[str, list[str]] = {}
    for (model, threads, batch_size), measured in _groups(metrics).items():
        columns[f"{threads} thread{'s' * (threads > 1)}, batch {batch_size}"] = None
        rate = measured[OWN].images_per_second
        share = f" ({rate / measured[TIMM].images_per_second:.0%})" if TIMM in measured else ""
        rows.setdefault(model, [f"`{model}`"]).append(f"{rate:.1f}{share}")
    return [["model", *columns], *rows.values()]


def _rows(metrics: Sequence[ImageFigure]) -> list[list[str]]:
    """A row for each model, number of threads and of images; ratios where timm was measured."""
    programs = list(dict.fromkeys(figure.program for figure in metrics))
    heading = ["model", "threads", "batch"]
    heading += [f"{program}, {kind}" for program in programs for kind in ("images/s", "best")]
    rows = [heading + (["of timm", "best of best"] if len(programs) > 1 else [])]
    for (model, threads, batch_size), measured in _groups(metrics).items():
        row = [model, str(threads), str(batch_size)]
        for program in programs:
            figure = measured[program]
            row += [f"{figure.images_per_second:.1f}", f"{figure.best:.1f}"]
        if len(programs) > 1:
            own, other = (measured[program] for program in programs)
            row.append(f"{own.images_per_second / other.images_per_second:.2f}")
            row.append(f"{own.best / other.best:.2f}")
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
