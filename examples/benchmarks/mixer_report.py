"""Results of the benchmark of mixers, with their tables and their picture."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from mixer_cell import BACKWARD, DECODING, FORWARD

from mlx_mmfree.cli.parts.terminal import aligned, markdown, size_text
from mlx_mmfree.errors import MeasurementError
from mlx_mmfree.evaluation.benchmark import Figure, Record, metrics
from mlx_mmfree.evaluation.picture import COLOURS, save_picture
from mlx_mmfree.platform.device import device_info
from mlx_mmfree.version import __version__

WORKS = {"forward": FORWARD, "backward": BACKWARD, "decoding": DECODING}
"""The possible measurements, by the names that flags use."""

SKIPPING = ("time", "memory")
"""Why a measurement stopped after which greater lengths are skipped: they would need more."""

_SAME = (
    "dims",
    "batch_size",
    "rounds",
    "seconds",
    "memory_bytes",
    "rate_length",
    "threads",
    "is_spatial",
)
"""Settings in which runs must agree that go on with each other."""

_SLOPE_SPAN = 16
"""A slope is fitted to lengths from the greatest one down to this part of it."""


@dataclass(frozen=True)
class MixerSettings:
    """How much is measured.

    Attributes:
        dims: Model dims.
        batch_size: Number of sequences.
        lengths: Lengths of the sequences, ascending; of maps, their numbers of positions.
        positions: Numbers of tokens after which decoding is measured, ascending.
        works: Keys of `WORKS`.
        rounds: Number of measurements in each process, after one that does not count.
        seconds: The most seconds for each process.
        memory_bytes: The most memory for each process.
        rate_length: The length at which recurrences are compared with the machine's limits; 0: they
            are not.
        rate_processes: The number of processes for each of these.
        threads: Number of threads that compute, 0 on a GPU.
        is_spatial: Whether spatial mixers are measured, on square maps, in place of token mixers.
    """

    dims: int = 512
    batch_size: int = 1
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    positions: tuple[int, ...] = (100, 10_000)
    works: tuple[str, ...] = tuple(WORKS)
    rounds: int = 3
    seconds: float = 60.0
    memory_bytes: int = 4 * 10**9
    rate_length: int = 4096
    rate_processes: int = 3
    threads: int = 0
    is_spatial: bool = False


@dataclass(frozen=True)
class Cell:
    """A measurement of one process: a mixer, a value of `WORKS`, and a length or position."""

    mixer: str
    work: str
    length: int


@dataclass(frozen=True)
class CellResult:
    """The result of a cell.

    Attributes:
        cell: The cell.
        seconds: Of the fastest round; for decoding, of a token.
        processor_seconds: Likewise, of all threads together.
        peak_bytes: The memory that was taken beside inputs and parameters.
        state_bytes: Of decoding, the size of the state.
        stopped: Why there are no numbers: `time`, `memory` or a sentence. Empty where there are.
        is_skipped: Whether a smaller length had stopped for the same reason.
        load: The load average of the machine then, of one minute.
    """

    cell: Cell
    seconds: float | None = None
    processor_seconds: float | None = None
    peak_bytes: int | None = None
    state_bytes: int | None = None
    stopped: str = ""
    is_skipped: bool = False
    load: float = 0.0


@dataclass
class MixerReport:
    """Everything that was measured.

    Attributes:
        machine: What the machine is.
        settings: How much was to be measured.
        cells: The results of the cells.
        rates: The rates of recurrences, one record for each process.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    cells: dict[Cell, CellResult] = field(default_factory=dict)
    rates: dict[str, list[Record]] = field(default_factory=dict)

    @property
    def clock(self) -> str:
        """Which time of a cell says most: of the processors where these compute, since other programs
        hardly change it."""
        return "processor_seconds" if self.settings["threads"] else "seconds"

    def values(self, work: str, name: str) -> dict[str, dict[int, float | None]]:
        """A number of each cell of some work, by mixer and by length."""
        found: dict[str, dict[int, float | None]] = {}
        for cell, result in self.cells.items():
            if cell.work == work:
                found.setdefault(cell.mixer, {})[cell.length] = getattr(result, name)
        return found

    def metrics(self, mixer: str) -> list[Figure]:
        """The rates of one mixer's recurrences."""
        return metrics(self.rates.get(mixer, []))

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "settings": self.settings,
            "cells": [asdict(result) for result in self.cells.values()],
            "rates": {
                mixer: [asdict(record) for record in records]
                for mixer, records in self.rates.items()
            },
        }

    def read(self, found: Mapping[str, Any]) -> None:
        """Adds what `to_json` of an earlier run gave.

        Raises:
            MeasurementError: That run measured something else.
            KeyError, TypeError: It is no such object.
        """
        # files that were begun before there was a choice have no such key
        settings = {"is_spatial": False} | found["settings"]
        for name in _SAME:
            if (other := settings[name]) != self.settings[name]:
                raise MeasurementError(
                    f"[bench] 'results' must hold a run with {name} {self.settings[name]} but got "
                    f"{other}. Choose another file, or the same settings."
                )
        for each in found["cells"]:
            cell = Cell(**each["cell"])
            self.cells[cell] = CellResult(**each | {"cell": cell})
        for mixer, records in found["rates"].items():
            self.rates[mixer] = [Record(**record) for record in records]


def new_report(settings: MixerSettings) -> MixerReport:
    """A report in which nothing is measured yet."""
    device = device_info()
    machine = {
        "version": __version__,
        "device": device.name,
        "processors": os.cpu_count(),
        "memory_bytes": device.memory_bytes,
    }
    given = asdict(settings)
    return MixerReport(machine, {name: _plain(value) for name, value in given.items()})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def slope(values: Mapping[int, float | None]) -> float | None:
    """The power of the length with which something grows: the slope of a line fitted to logarithms.

    Args:
        values: By length; `None` where there is none. The greatest lengths count, down to a sixteenth of
            the greatest.

    Returns:
        The power, or `None` where fewer than three values count.
    """
    known = {length: value for length, value in values.items() if value}
    counted = {n: known[n] for n in known if n * _SLOPE_SPAN >= max(known)}
    if len(counted) < 3:
        return None
    power, _ = np.polyfit(np.log([*counted]), np.log([*counted.values()]), 1)
    return float(power)


Rows = list[list[str]]
Text = Callable[[float], str]


def mixer_lines(report: MixerReport, is_markdown: bool = False) -> list[str]:
    """All tables, each below a line that says what it shows."""
    lines = _machine_lines(report)
    for title, rows in [*_length_tables(report), *_decoding_tables(report), *_rate_tables(report)]:
        lines += ["", title, *([""] if is_markdown else [])]
        lines += markdown(_with_code(rows)) if is_markdown else aligned(rows)
    return [*lines, *_reasons(report)]


def _machine_lines(report: MixerReport) -> list[str]:
    settings, loads = report.settings, [result.load for result in report.cells.values()]
    threads = settings["threads"]
    lines = [
        f"{report.machine['device']}, {f'threads: {threads}' if threads else 'on the GPU'}; dims: "
        f"{settings['dims']}, {'maps' if settings['is_spatial'] else 'sequences'}: "
        f"{settings['batch_size']}; default options of each mixer"
    ]
    if loads:
        lines.append(
            f"load average while measuring: {min(loads):.1f} to {max(loads):.1f} on "
            f"{report.machine['processors']} processors"
        )
    return lines


def _length_tables(report: MixerReport) -> list[tuple[str, Rows]]:
    works = {cell.work: None for cell in report.cells if cell.work != DECODING}
    columns = {
        "seconds": ("time of the fastest round", seconds_text),
        "processor_seconds": ("processor time of the fastest round, all threads", seconds_text),
        "peak_bytes": ("memory beside inputs and parameters", _size_text),
    }
    if not report.settings["threads"]:
        del columns["processor_seconds"]
    return [
        (f"{work}: {title}", _lengths(report, work, name, text))
        for work in works
        for name, (title, text) in columns.items()
    ]


def _lengths(report: MixerReport, work: str, name: str, text: Text) -> Rows:
    values = report.values(work, name)
    lengths = sorted({length for own in values.values() for length in own})
    rows = [["mixer", *(_size_of(report, length) for length in lengths), "slope"]]
    for mixer, own in values.items():
        results = [report.cells.get(Cell(mixer, work, length)) for length in lengths]
        power = slope(own)
        cells = [_cell(report, result, name, text) for result in results]
        rows.append([mixer, *cells, "" if power is None else f"{power:.2f}"])
    return rows


def _size_of(report: MixerReport, length: int) -> str:
    """A length, or the sides of a square map; slopes are by its positions."""
    side = isqrt(length)
    return f"{side} x {side}" if report.settings["is_spatial"] else f"{length:,}"


def _cell(report: MixerReport, result: CellResult | None, name: str, text: Text) -> str:
    if result is None:
        return ""
    if result.stopped == "time":
        return f"> {report.settings['seconds']:g} s"
    if result.stopped == "memory":
        return f"> {size_text(report.settings['memory_bytes'])}"
    return "failed" if result.stopped else text(getattr(result, name))


def _decoding_tables(report: MixerReport) -> list[tuple[str, Rows]]:
    times = report.values(DECODING, report.clock)
    positions = sorted({position for own in times.values() for position in own})
    if not positions:
        return []
    rows = [["mixer", *(f"at {p:,}" for p in positions), "ratio"]]
    rows[0] += [f"state at {p:,}" for p in positions]
    for mixer, own in times.items():
        results = [report.cells.get(Cell(mixer, DECODING, p)) for p in positions]
        first, last = own.get(positions[0]), own.get(positions[-1])
        ratio = f"{last / first:.2f}" if first and last and len(positions) > 1 else ""
        cells = [_cell(report, result, report.clock, seconds_text) for result in results]
        states = [size_text(r.state_bytes) if r and r.state_bytes else "" for r in results]
        rows.append([mixer, *cells, ratio, *states])
    kind = "processor time" if report.clock == "processor_seconds" else "time"
    return [(f"decoding: {kind} of a token after so many others, and the size of the state", rows)]


def _rate_tables(report: MixerReport) -> list[tuple[str, Rows]]:
    rows = [["recurrence", "time", "rate", "limit", "of limit", "in each process"]]
    for mixer in report.rates:
        for figure in report.metrics(mixer):
            first = figure.records[0]
            amount, unit = (first.macs, "GMAC/s") if first.macs else (first.bytes, "GB/s")
            limit = max(record.limit_rate for record in figure.records)
            rows.append(
                [
                    first.name,
                    seconds_text(figure.seconds),
                    f"{amount / figure.seconds / 1e9:.1f} {unit}",
                    f"{first.limit}, {limit / 1e9:.1f} {unit}",
                    f"{figure.share:.0%}",
                    " ".join(f"{record.share:.0%}" for record in figure.records),
                ]
            )
    if len(rows) == 1:
        return []
    length = report.settings["rate_length"]
    kind = "time" if report.clock == "seconds" else "processor time of all threads"
    title = (
        f"recurrences at length {length:,}, {kind}, measured in turn with their limits: those with a "
        "matrix as state beside a product of 1,024 x 1,024 float32 matrices, counting the "
        "multiplications that chunks of 64 need and no masked ones; others beside a copy of the bytes "
        "that they must move"
    )
    return [(title, rows)]


def _reasons(report: MixerReport) -> list[str]:
    return [
        f"{r.cell.mixer}, {r.cell.work}, {r.cell.length}: {r.stopped}"
        for r in report.cells.values()
        if r.stopped and r.stopped not in SKIPPING
    ]


def _with_code(rows: Rows) -> Rows:
    """The rows with their names as code, below the heading."""
    return [rows[0], *([f"`{name}`", *rest] for name, *rest in rows[1:])]


def _size_text(nbytes: float) -> str:
    return size_text(int(nbytes))


def seconds_text(seconds: float) -> str:
    """A time in s, ms or us."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_UNITS = {"time": "ms", "memory": "MB"}
_FACTORS = {"time": 1e3, "memory": 1e-6}

Values = Mapping[str, Mapping[int, float | None]]


def plot_mixers(report: MixerReport, file: Path) -> None:
    """Draws time and memory of each mixer against the length, and the time of a decoded token, as PNG.

    Needs the package `matplotlib`.

    Args:
        report: What was measured.
        file: The file, which is replaced as a whole.

    Raises:
        ImportError: `matplotlib` is not installed.
    """
    from matplotlib.figure import Figure as Canvas

    clock = report.clock
    is_spatial = report.settings["is_spatial"]
    size = "positions of the map" if is_spatial else "length (tokens)"
    kinds = {"time": clock, "memory": "peak_bytes"}
    kind = "processor time" if clock == "processor_seconds" else "time"
    mixers = list({cell.mixer: None for cell in report.cells})
    canvas = Canvas(figsize=(17, 10), dpi=110, layout="constrained")
    panels = canvas.subplots(2, 3, squeeze=False)
    for column, work in enumerate((FORWARD, BACKWARD)):
        for row, (what, name) in enumerate(kinds.items()):
            values = report.values(work, name)
            title = f"{work}: {kind if what == 'time' else 'peak memory'}"
            _draw(panels[row][column], mixers, values, what, title, size)
    decoding = report.values(DECODING, clock)
    title = f"decoding a token: {kind}"
    if is_spatial:
        panels[0][2].axis("off")
    else:
        _draw(panels[0][2], mixers, decoding, "time", title, "position (tokens before)")
    _draw_legend(panels[1][2], mixers, report)
    settings = report.settings
    kinds_of_mixers = "Spatial mixers" if is_spatial else "Token mixers"
    canvas.suptitle(
        f"{kinds_of_mixers} of {settings['dims']} dims on {report.machine['device']}: what a "
        f"{'place' if is_spatial else 'length'} costs"
    )
    save_picture(canvas, file)


def _style(number: int) -> dict[str, Any]:
    """Colour, line and marker, together of no other mixer."""
    turn = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _LINES[turn % len(_LINES)],
        "marker": _MARKERS[turn % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.3,
    }


def _draw(axes: Any, mixers: list[str], values: Values, what: str, title: str, xlabel: str) -> None:
    lengths = sorted({length for own in values.values() for length in own})
    for number, mixer in enumerate(mixers):
        points = [(n, y) for n, y in sorted(values.get(mixer, {}).items()) if y]
        if points:
            x = [n for n, _ in points]
            axes.plot(x, [y * _FACTORS[what] for _, y in points], **_style(number))
    axes.set(
        xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel=f"{what} ({_UNITS[what]})"
    )
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)


def _draw_legend(axes: Any, mixers: list[str], report: MixerReport) -> None:
    """The styles, and the powers of the length with which each panel grows."""
    columns = [
        report.values(work, name)
        for name in (report.clock, "peak_bytes")
        for work in (FORWARD, BACKWARD)
    ]
    for number, mixer in enumerate(mixers):
        powers = [slope(values.get(mixer, {})) for values in columns]
        texts = [f"{'-' if power is None else f'{power:.2f}':>6}" for power in powers]
        axes.plot([], [], label=f"{mixer:<25}{''.join(texts)}", **_style(number))
    axes.axis("off")
    legend = axes.legend(
        title=f"{'':<7}slopes fitted over the greatest lengths\n"
        f"{'':<32}{'time':>12}{'memory':>12}\n{'':<32}{'fwd':>6}{'+bwd':>6}{'fwd':>6}{'+bwd':>6}",
        loc="center",
        ncols=1,
        prop={"family": "monospace", "size": 7.5},
        title_fontproperties={"family": "monospace", "size": 7.5},
        handlelength=4,
        labelspacing=0.1,
        alignment="left",
    )
    # else the panels beside it shrink
    legend.set_in_layout(False)
