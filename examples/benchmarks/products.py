"""Measures products, a training step and models of random weights beside the limits of this machine."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import mlx.core as mx
from product_tasks import TERNARY
from random_models import add_config_flag, has_dense_head, random_packed
from roofline import plot_roofline

from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.flags import positive
from mlx_mmfree.cli.parts.loading import DTYPES
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.cli.parts.picture_flag import add_picture_flag, check_picture
from mlx_mmfree.errors import MeasurementError, UsageError
from mlx_mmfree.evaluation.audit.skeleton import read_config
from mlx_mmfree.evaluation.benchmark import Figure, Record, measure, metrics
from mlx_mmfree.ops import backend_report
from mlx_mmfree.ops.backend.dispatch import on_cpu
from mlx_mmfree.platform.device import device_info
from mlx_mmfree.platform.threads import thread_count
from mlx_mmfree.version import __version__

SHAPES = ((6912, 2560), (2560, 6912), (11264, 2048))
"""Output and input dims: up and down projection of BitNet-2B-4T, stacked gates of MMfreeLM-1.3B."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """How much is measured.

    Attributes:
        processes: Number of fresh processes for each measurement.
        rounds: Number of measurements in each process.
        walk_bytes: Smallest number of bytes that the copies of one matrix take together.
        shapes: Output and input dims of the ternary matrices.
        rows: Numbers of tokens multiplied at a time.
        heads: Output and input dims of the heads.
        head_bits: Bits of the heads' weights.
        prompt_tokens: Lengths of the prompts whose reading is timed.
        positions: Numbers of tokens read before decoding is timed.
        decoded_tokens: Number of tokens decoded in each round.
        training_tokens: Number of tokens in the training batch.
        is_small: Whether to train a tiny model, and to compare llama.cpp with one.
    """

    processes: int = 8
    rounds: int = 5
    walk_bytes: int = 2**29
    shapes: tuple[tuple[int, int], ...] = SHAPES
    rows: tuple[int, ...] = (1, 128)
    heads: tuple[tuple[int, int], ...] = ((128256, 2560),)
    head_bits: tuple[int, ...] = (4, 6, 8, 16)
    prompt_tokens: tuple[int, ...] = (128, 512)
    positions: tuple[int, ...] = (16, 512, 2048)
    decoded_tokens: int = 16
    training_tokens: int = 512
    is_small: bool = False


ON_GPU = BenchmarkSettings(processes=3, rows=(1, 8, 32, 128))
"""Settings for a GPU, with fewer processes, as each measures for longer."""

QUICK = BenchmarkSettings(
    processes=1,
    rounds=1,
    walk_bytes=2**20,
    shapes=((256, 512),),
    rows=(1, 8),
    heads=((512, 256),),
    prompt_tokens=(8,),
    positions=(2, 8),
    decoded_tokens=2,
    training_tokens=8,
    is_small=True,
)
"""A run of seconds. Its data fit into the caches, so that its numbers say nothing about speed."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast something is as something else.

    All processes count, since memory may be slow for one alone.

    Attributes:
        name: What was measured.
        other: What it is compared with.
        median: The ratio of the medians of all processes.
        best: The ratio of the best processes.
    """

    name: str
    other: str
    median: float
    best: float

    @classmethod
    def of(cls, name: str, own: Figure, other_name: str, other: Figure) -> "Ratio":
        """Compares two metrics."""
        ours, theirs = (
            [median(record.seconds) for record in figure.records] for figure in (own, other)
        )
        return cls(name, other_name, median(theirs) / median(ours), min(theirs) / min(ours))


@dataclass
class Report:
    """Everything that was measured.

    Attributes:
        machine: What the machine is and what its limits are.
        metrics: The metrics in the order of measurement.
        memory: The memory use of each model in each process.
        ratios: Speed in relation to other programs and libraries.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    metrics: list[Figure] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "metrics": [figure.to_json() for figure in self.metrics],
            "memory": self.memory,
            "ratios": [asdict(ratio) for ratio in self.ratios],
        }


def benchmark(
    settings: BenchmarkSettings,
    threads: Sequence[int],
    *,
    products: bool = True,
    training: bool = True,
    models: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Report]:
    """Measures one thing after the other. Each report holds what the last measurement added.

    Args:
        settings: How much is measured.
        threads: Numbers of threads to measure with, 0 for a GPU. Models and training use the last.
        products: Whether to measure ternary products and heads.
        training: Whether to measure a training step.
        models: The models to measure: the first arguments of `measure_random`.

    Raises:
        MeasurementError: A process failed.
    """
    yield Report(machine=_describe())
    if products:
        tasks = [(PRODUCTS, _products(settings), count) for count in threads]
        found, notes = measured_in_turn(tasks, settings.processes)
        measured = metrics(found)
        yield Report(_best(notes), measured, ratios=beside(measured))
    if training:
        task = (TRAINING, _training(settings), threads[-1])
        yield Report(metrics=metrics(measured_in_turn([task], settings.processes)[0]))
    for choice in models:
        task = (MODEL, {**choice, **model_amounts(settings)}, threads[-1])
        found, notes = measured_in_turn([task], settings.processes)
        yield Report(metrics=metrics(found), memory=notes)


Task = tuple[str, dict[str, Any], int]
PRODUCTS, TRAINING = "product_tasks:measure_products", "product_tasks:measure_training"
MODEL = "random_models:measure_random"


def measured_in_turn(
    tasks: Sequence[Task], processes: int
) -> tuple[list[Record], list[dict[str, Any]]]:
    """The records of tasks in fresh processes, in turn, and what else they found."""
    records, notes = [], []
    for _ in range(processes):
        for task, arguments, threads in tasks:
            found = measure(task, arguments, threads)
            records += [Record(**record) for record in found["records"]]
            if note := found.get("notes") or found.get("memory"):
                notes.append(note | {"threads": threads})
    return records, notes


def _describe() -> dict[str, Any]:
    device = device_info()
    report = backend_report(
        "mlx_mmfree.ops.ternary_matmul", mx.zeros((1, 32)), random_packed(1, 32), codes=True
    )
    return {
        "version": __version__,
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "backend": next(name for name, reason in report.items() if reason is None),
    }


def _best(notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest plain read and the fastest arithmetic for each number of threads."""
    by_threads: dict[str, Any] = {}
    for note in notes:
        best = by_threads.setdefault(str(note["threads"]), {})
        for name in ("bytes_per_second", "macs_per_second"):
            best[name] = max(best.get(name) or 0, note[name] or 0) or None
        best |= {name: note[name] for name in ("read_method", "arithmetic")}
    found: dict[str, Any] = {"limits": by_threads}
    for name in ("left_out", "chosen", "switched_off"):
        if facts := {key: fact for note in notes for key, fact in note.get(name, {}).items()}:
            found[name] = facts
    return found


def _products(settings: BenchmarkSettings) -> dict[str, Any]:
    return {
        "shapes": settings.shapes,
        "rows": settings.rows,
        "heads": settings.heads,
        "head_bits": settings.head_bits,
        "walk_bytes": settings.walk_bytes,
        "rounds": settings.rounds,
    }


def _training(settings: BenchmarkSettings) -> dict[str, Any]:
    dims, layers = (64, 1) if settings.is_small else (1024, 4)
    return {
        "name": f"MatMul-free, {layers} block{'s' if layers > 1 else ''} of {dims}",
        "config": {
            "model_type": "hgrn_bit",
            "vocab_size": 64 if settings.is_small else 32000,
            "hidden_size": dims,
            "num_hidden_layers": layers,
        },
        "batch_size": 1,
        "length": settings.training_tokens,
        "rounds": settings.rounds,
    }


def model_amounts(settings: BenchmarkSettings) -> dict[str, Any]:
    """How much is measured of a model."""
    names = ("prompt_tokens", "positions", "decoded_tokens", "rounds")
    return {name: getattr(settings, name) for name in names}


def join(reports: Iterator[Report], show: Callable[[Report], None]) -> Report:
    """Shows each report as it comes, and returns all of them merged into one."""
    whole = Report()
    for report in reports:
        show(report)
        whole.machine |= report.machine
        whole.metrics += report.metrics
        whole.memory += report.memory
        whole.ratios += report.ratios
    return whole


def beside(measured: Sequence[Figure]) -> list[Ratio]:
    """Ternary products in relation to others with the same shape, rows and threads."""
    found = []
    for own in measured:
        name, threads = own.records[0].name, own.records[0].threads
        if not name.startswith(TERNARY):
            continue
        for other in measured:
            full = other.records[0].name
            title = full.removesuffix(name.removeprefix(TERNARY))
            if title not in (TERNARY, full) and other.records[0].threads == threads:
                on = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
                found.append(Ratio.of(name + on, own, title, other))
    return found


def report_lines(report: Report) -> list[str]:
    """The lines of one part of the benchmark."""
    lines = []
    if "device" in report.machine:
        machine = report.machine
        lines += [f"{machine['device']}, ternary products by the backend '{machine['backend']}'"]
        lines += [
            "'of limit' compares each figure with its limit, measured in turn with it. It is the median "
            "of the processes whose limit was fast.",
            _HEADER,
        ]
    for threads, limit in report.machine.get("limits", {}).items():
        lines += _limit_lines(threads, limit)
    lines += [_figure_line(figure) for figure in report.metrics]
    lines += _memory_lines(report.memory)
    for ratio in report.ratios:
        lines.append(
            f"{ratio.name}: {ratio.median:.2f} times as fast as {ratio.other} by the medians of all "
            f"processes, {ratio.best:.2f} times by the best"
        )
    for name, reason in report.machine.get("left_out", {}).items():
        lines.append(f"{name} was not measured: {reason}")
    for name, fault in report.machine.get("switched_off", {}).items():
        lines.append(f"The kernel {name} is switched off and slower code did its work: {fault}")
    return lines


_NAMES = ("", "threads", "time", "GB/s", "GMAC/s", "of limit", "limit", "tokens/s")


def _row(*cells: str) -> str:
    name, threads, time, bandwidth, rate, share, limit, tokens = cells
    return (
        f"{name:<58} {threads:>7} {time:>10} {bandwidth:>7} {rate:>7} {share:>8}  {limit:<16} "
        f"{tokens:>8}"
    )


_HEADER = f"\n{_row(*_NAMES)}  of limit in each process (not counted)"


def _limit_lines(threads: str, limit: dict[str, Any]) -> list[str]:
    rate = f"{limit['bytes_per_second'] / 1e9:.1f}"
    shown = _shown_threads(int(threads))
    cells = ("limit: fastest plain read", shown, "", rate, "", "", "", "")
    lines = [_row(*cells).rstrip()]
    if limit["macs_per_second"]:
        rate = f"{limit['macs_per_second'] / 1e9:.0f}"
        cells = (f"limit: fastest {limit['arithmetic']}", shown, "", "", rate, "", "", "")
        lines.append(_row(*cells).rstrip())
    return lines


def _shown_threads(count: int) -> str:
    return str(count) if count else "GPU"


def _figure_line(figure: Figure) -> str:
    shown = figure.to_json()
    first = figure.records[0]
    seconds = shown["seconds"]
    counted = figure.counted
    shares = " ".join(
        f"{r.share:.0%}" if r in counted else f"({r.share:.0%})" for r in figure.records
    )
    cells = (
        first.name,
        _shown_threads(first.threads),
        f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms",
        f"{shown['gb_per_second']:.1f}" if first.bytes else "",
        f"{shown['gmac_per_second']:.0f}",
        f"{figure.share:.0%}",
        first.limit,
        f"{shown['rate']:.1f}" if first.unit == "tokens" else "",
    )
    return f"{_row(*cells)}  {shares}"


def _memory_lines(notes: list[dict[str, Any]]) -> list[str]:
    lines = []
    for note in notes[:1]:
        loading, peak = (
            max(other[name] for other in notes) for name in ("loading_bytes", "peak_bytes")
        )
        tensors = note["tensor_bytes"]
        lines.append(
            f"{note['model']}: {tensors / 1e6:.0f} MB of tensors; the peak of resident memory was "
            f"{loading / tensors:.2f} times that after loading and {peak / tensors:.2f} times at the end"
        )
    return lines


def matrix_shape(text: str) -> tuple[int, int]:
    """The outputs and inputs of a matrix, written as `1024x2816`."""
    outputs, _, inputs = text.partition("x")
    return positive(outputs), positive(inputs)


_SETTINGS = ("processes", "rounds", "rows", "prompt_tokens", "positions", "decoded_tokens")
_HEAD_BITS = (4, 6, 8, 16)


def build_parser() -> CommandParser:
    parser = CommandParser(prog="products.py", description=__doc__)
    _add_model_flags(parser.add_argument_group("models"))
    _add_amount_flags(parser.add_argument_group("amount"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    add_picture_flag(output, what="draw the roofline")
    return parser


def _add_model_flags(group: Any) -> None:
    add_config_flag(group)
    group.add_argument(
        "--head-bits",
        type=int,
        choices=_HEAD_BITS,
        nargs="+",
        default=[6],
        help="with random weights: bits of an output head that is not ternary (6)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="float type to compute in; default: the published files' own, else float32",
    )


def _add_amount_flags(group: Any) -> None:
    group.add_argument(
        "--threads",
        type=positive,
        nargs="+",
        help="numbers of threads of a CPU (1 and all processors)",
    )
    group.add_argument(
        "--processes",
        type=positive,
        help="number of fresh processes for each figure (8, on a GPU 3)",
    )
    group.add_argument("--rounds", type=positive, help="number of measurements in each process (5)")
    group.add_argument(
        "--prompt-tokens", type=positive, nargs="+", help="lengths of the prompts to read (128 512)"
    )
    group.add_argument(
        "--positions",
        type=positive,
        nargs="+",
        help="numbers of tokens after which decoding is measured (16 512 2048)",
    )
    group.add_argument(
        "--decoded-tokens", type=positive, help="number of tokens decoded in a measurement (16)"
    )
    for name, what in (("products", "ternary products and heads"), ("training", "a training step")):
        group.add_argument(
            f"--{name}",
            action=argparse.BooleanOptionalAction,
            default=True,
            help=f"whether to measure {what}; default: yes",
        )
    group.add_argument(
        "--shapes",
        type=matrix_shape,
        nargs="+",
        metavar="OUTPUTSxINPUTS",
        help="shapes of ternary matrices to measure, without heads, instead of the usual ones",
    )
    group.add_argument(
        "--rows", type=positive, nargs="+", help="numbers of tokens multiplied at a time (1 128)"
    )
    group.add_argument(
        "--walk-mb",
        type=positive,
        help="megabytes of all copies of a matrix (537); few of them stay in a cache",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="try the command in seconds; its numbers say nothing about speed",
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_picture("bench", args.picture)
    reports = benchmark(
        _settings(args),
        _threads(args),
        products=args.products,
        training=args.training,
        models=_models(args),
    )
    stops: list[BaseException] = []
    whole = join(_until_stopped(reports, stops), _ignore if args.json else _show)
    if args.picture is not None and whole.metrics:
        plot_roofline(whole.machine, whole.metrics, args.picture)
    if args.json:
        print(json.dumps(whole.to_json() | {"is_complete": not stops}))
    for stop in stops:
        raise stop
    return 0


def _threads(args: argparse.Namespace) -> list[int]:
    """The numbers of threads to measure with, 0 for a GPU."""
    if on_cpu():
        return args.threads or sorted({1, thread_count()})
    if args.threads:
        raise UsageError(
            f"[bench] 'threads' must be left out where a GPU computes but got {args.threads[0]}."
        )
    return [0]


def _until_stopped(reports: Iterator[Report], stops: list[BaseException]) -> Iterator[Report]:
    """Yields the reports up to Ctrl-C or a failure, which `stops` gets: what was measured is kept."""
    try:
        yield from reports
    except (KeyboardInterrupt, MeasurementError) as stop:
        stops.append(stop)


def _settings(args: argparse.Namespace) -> BenchmarkSettings:
    usual = BenchmarkSettings() if on_cpu() else ON_GPU
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _SETTINGS
        if (value := getattr(args, name)) is not None
    }
    if args.shapes:
        given |= {"shapes": tuple(args.shapes), "heads": ()}
    if args.walk_mb:
        given["walk_bytes"] = args.walk_mb * 10**6
    return replace(QUICK if args.quick else usual, **given)


def _models(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The models to measure, those with a head that is not ternary with each number of bits."""
    choices = []
    for name in args.config:
        config = read_config("bench", name)
        shared = {"config": config, "dtype": args.dtype}
        if has_dense_head(config):
            for bits in args.head_bits:
                choices.append({"name": f"{name}, {bits}-bit head", "head_bits": bits, **shared})
        else:
            choices.append({"name": name, **shared})
    return choices


def _show(report: Report) -> None:
    for line in report_lines(report):
        print(line, flush=True)


def _ignore(_: Report) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
