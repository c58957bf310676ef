"""Measures time and memory of mixers against the length, or the size of a map."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mixer_cell import DECODING
from mixer_report import (
    SKIPPING,
    WORKS,
    Cell,
    CellResult,
    MixerReport,
    MixerSettings,
    mixer_lines,
    new_report,
    plot_mixers,
)
from tqdm import tqdm

from mlx_mmfree.cli.parts.command import check_writable, command
from mlx_mmfree.cli.parts.flags import gigabytes, non_negative, positive
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.cli.parts.picture_flag import add_picture_flag
from mlx_mmfree.errors import CheckpointError, MeasurementError, UsageError
from mlx_mmfree.evaluation.benchmark import Record, measure
from mlx_mmfree.files.reading import read_json_object, write_json
from mlx_mmfree.files.writing import new_file, writing
from mlx_mmfree.models.parts.mixers import (
    find_spatial_mixer,
    find_token_mixer,
    spatial_mixers,
    token_mixers,
)
from mlx_mmfree.ops.backend.dispatch import on_cpu
from mlx_mmfree.platform.resident_memory import BYTES_PER_GB
from mlx_mmfree.platform.threads import thread_count

_SIDES, _QUICK_SIDES = (8, 16, 32, 64, 128), (4, 8, 16)
_WORKS = ("forward", "backward", "decoding")
_SIZES = ("dims", "batch_size", "rounds", "rate_processes")
_QUICK: dict[str, Any] = {
    "dims": 32,
    "lengths": (16, 32, 64),
    "positions": (4, 16),
    "rounds": 1,
    "rate_length": 128,
    "rate_processes": 1,
}


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="mixers.py",
        description=__doc__,
        epilog="Each figure comes from a fresh process. Ctrl-C prints what is there, and the same "
        "command with --results goes on where it stopped.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="MIXER",
        help="names as 'mmfree mixers' lists them, with --spatial too; default: all",
    )
    parser.add_argument(
        "--work",
        nargs="+",
        choices=_WORKS,
        default=list(_WORKS),
        help="what is measured: %(choices)s, where backward is a forward pass and its gradients",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        help="lengths of the sequences (512 to 32768, doubling)",
    )
    parser.add_argument(
        "--spatial",
        type=positive,
        nargs="*",
        metavar="SIDE",
        help="measure spatial mixers instead, on square maps of these sides (8 to 128, doubling)",
    )
    parser.add_argument(
        "--positions",
        type=positive,
        nargs="+",
        help="numbers of tokens after which decoding is measured (100 10000)",
    )
    parser.add_argument("--dims", type=positive, help="model dims (512)")
    parser.add_argument("--batch-size", type=positive, help="sequences at a time (1)")
    parser.add_argument("--rounds", type=positive, help="measurements in each process (3)")
    parser.add_argument("--threads", type=positive, help="threads of a CPU (all processors)")
    parser.add_argument(
        "--time-limit", type=positive, default=60, help="the most seconds for each process (60)"
    )
    parser.add_argument(
        "--memory-limit",
        type=gigabytes,
        default=4 * BYTES_PER_GB,
        metavar="GB",
        help="the most memory for each process (4)",
    )
    parser.add_argument(
        "--rate-length",
        type=non_negative,
        help="length at which recurrences are compared with the limits of the machine; 0: they are "
        "not (4096)",
    )
    parser.add_argument(
        "--rate-processes", type=positive, help="fresh processes for each of these ratios (3)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try the command in a short time; its numbers say nothing about speed",
    )
    _add_output_flags(parser.add_argument_group("output"))
    return parser


def _add_output_flags(group: Any) -> None:
    format = group.add_mutually_exclusive_group()
    format.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    format.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    group.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="JSON file that keeps each figure; what it holds is not measured again",
    )
    add_picture_flag(group, what="draw the metrics with fitted slopes")


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    _check(args)
    is_spatial = args.spatial is not None
    names = args.names or list(spatial_mixers() if is_spatial else token_mixers())
    for name in names:
        if is_spatial:
            find_spatial_mixer(name)
        else:
            find_token_mixer(name)
    settings = _settings(args)
    report = new_report(settings)
    _read(args.results, report)
    stops = _measure(args, names, settings, report)
    if args.picture is not None and report.cells:
        plot_mixers(report, args.picture)
    if args.json:
        print(json.dumps(report.to_json() | {"is_complete": not stops}))
    else:
        print("\n".join(mixer_lines(report, args.markdown)))
    for stop in stops:
        raise stop
    return 0


def _measure(
    args: argparse.Namespace, names: Sequence[str], settings: MixerSettings, report: MixerReport
) -> list[BaseException]:
    """Measures what the report lacks; what is there stays if it is interrupted."""

    def keep(report: MixerReport) -> None:
        if args.results is not None:
            with writing("bench", args.results), new_file(args.results) as file:
                write_json(file, report.to_json())

    total = remaining(report, names, settings)
    try:
        with tqdm(total=total, unit="figure", disable=None, dynamic_ncols=True) as bar:
            for number, what in enumerate(benchmark_mixers(report, names, settings, keep)):
                bar.update(number - bar.n)
                bar.set_postfix_str(what)
            bar.update(total - bar.n)
    except (KeyboardInterrupt, MeasurementError) as stop:
        return [stop]
    return []


def _check(args: argparse.Namespace) -> None:
    for name in ("lengths", "positions", "rate_length"):
        if args.spatial is not None and getattr(args, name) is not None:
            raise UsageError(
                f"[bench] '{name}' must be left out with 'spatial', which measures maps, but got "
                f"{getattr(args, name)}. Give the sides after --spatial."
            )
    if args.spatial is not None and args.work == ["decoding"]:
        raise UsageError(
            "[bench] 'work' must be forward or backward with 'spatial' but got decoding. Leave it out."
        )
    if args.picture is not None:
        if find_spec("matplotlib") is None:
            raise UsageError(
                "[bench] 'picture' needs the package matplotlib, which is not installed. Install it: "
                "pip install matplotlib"
            )
        check_writable("[bench] 'picture'", args.picture)
    if args.results is not None:
        check_writable("[bench] 'results'", args.results)


def _settings(args: argparse.Namespace) -> MixerSettings:
    if args.threads and not on_cpu():
        raise UsageError(
            f"[bench] 'threads' must be left out where a GPU computes but got {args.threads}."
        )
    given: dict[str, Any] = dict(_QUICK) if args.quick else {}
    for name in (*_SIZES, "rate_length"):
        if (value := getattr(args, name)) is not None:
            given[name] = value
    for name in ("lengths", "positions"):
        if (values := getattr(args, name)) is not None:
            given[name] = tuple(sorted(set(values)))
    if args.spatial is not None:
        sides = args.spatial or (_QUICK_SIDES if args.quick else _SIDES)
        sizes = tuple(side * side for side in sorted(set(sides)))
        given |= {"lengths": sizes, "rate_length": 0, "is_spatial": True}
    return replace(
        MixerSettings(threads=(args.threads or thread_count()) if on_cpu() else 0),
        works=tuple(name for name in _WORKS if name in args.work),
        seconds=float(args.time_limit),
        memory_bytes=args.memory_limit,
        **given,
    )


def _read(file: Path | None, report: MixerReport) -> None:
    """Adds what an earlier run has kept."""
    if file is None or not file.exists():
        return
    try:
        report.read(read_json_object(file))
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"[bench] 'results' must be a file that this command wrote, or a new one, but '{file}' is "
            "something else."
        ) from error


def planned_cells(mixers: Sequence[str], settings: MixerSettings) -> list[Cell]:
    """The cells of these mixers, mixer by mixer; only causal token mixers decode.

    Raises:
        UnsupportedModelError: No mixer has one of the names.
    """
    cells = []
    for mixer in mixers:
        is_causal = not settings.is_spatial and find_token_mixer(mixer).causal
        for name in settings.works:
            work = WORKS[name]
            if work == DECODING and not is_causal:
                continue
            lengths = settings.positions if work == DECODING else settings.lengths
            cells += [Cell(mixer, work, length) for length in lengths]
    return cells


def benchmark_mixers(
    report: MixerReport,
    mixers: Sequence[str],
    settings: MixerSettings,
    keep: Callable[[MixerReport], None],
) -> Iterator[str]:
    """Measures into a report what it lacks.

    Args:
        report: What was measured before.
        mixers: Names of mixers.
        settings: How much is measured.
        keep: Called with the report after each measurement.

    Yields:
        What is measured next, as text, before it is; nothing for what the report has.
    """
    for cell in planned_cells(mixers, settings):
        if cell in report.cells:
            continue
        yield f"{cell.mixer}, {cell.work}, {cell.length}"
        report.cells[cell] = _shorter(report, cell) or _measured(cell, settings)
        keep(report)
    for mixer in mixers:
        if not settings.rate_length or mixer in report.rates or not _has_rate(mixer):
            continue
        yield f"{mixer}, rates"
        report.rates[mixer] = _rates(mixer, settings)
        keep(report)


def remaining(report: MixerReport, mixers: Sequence[str], settings: MixerSettings) -> int:
    """How many measurements the report lacks."""
    cells = [cell for cell in planned_cells(mixers, settings) if cell not in report.cells]
    if not settings.rate_length:
        return len(cells)
    return len(cells) + sum(_has_rate(name) and name not in report.rates for name in mixers)


def _has_rate(mixer: str) -> bool:
    return find_token_mixer(mixer).recurrent


def _shorter(report: MixerReport, cell: Cell) -> CellResult | None:
    """The result of a cell that a shorter one has shown to be beyond the limits."""
    for other, result in report.cells.items():
        is_same = (other.mixer, other.work) == (cell.mixer, cell.work)
        if is_same and other.length < cell.length and result.stopped in SKIPPING:
            return CellResult(cell, stopped=result.stopped, is_skipped=True, load=_load())
    return None


def _measured(cell: Cell, settings: MixerSettings) -> CellResult:
    arguments = asdict(cell) | {
        name: getattr(settings, name)
        for name in ("dims", "batch_size", "rounds", "memory_bytes", "is_spatial")
    }
    try:
        found = measure("mixer_cell:measure_cell", arguments, settings.threads, settings.seconds)
    except subprocess.TimeoutExpired:
        found = {"stopped": "time"}
    except MeasurementError as error:
        found = {"stopped": str(error)}
    return CellResult(cell, **found, load=_load())


def _rates(mixer: str, settings: MixerSettings) -> list[Record]:
    arguments = {
        "mixer": mixer,
        "length": settings.rate_length,
        "dims": settings.dims,
        "batch_size": settings.batch_size,
        "rounds": settings.rounds,
    }
    found: list[Record] = []
    for _ in range(settings.rate_processes):
        found += [
            Record(**r) for r in measure("mixer_cell:measure_rates", arguments, settings.threads)
        ]
    return found


def _load() -> float:
    return os.getloadavg()[0]


if __name__ == "__main__":
    sys.exit(main())
