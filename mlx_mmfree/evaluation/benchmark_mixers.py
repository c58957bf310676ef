"""Time and memory of mixers against the length or the size, each measured in a fresh process."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import MeasurementError
from ..models.parts.mixers import find_token_mixer
from ..platform.device import device_info
from ..version import __version__
from .benchmark_mixer_cell import BACKWARD, DECODING, FORWARD
from .benchmark_process import measure
from .benchmark_record import Figure, Record, figures

WORKS = {"forward": FORWARD, "backward": BACKWARD, "decoding": DECODING}
"""What can be measured, by the names that flags use."""

SKIPPING = ("time", "memory")
"""Why a measurement stopped that spares those of greater lengths: they would need more."""

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
        lengths: Lengths of the sequences, ascending; of maps, their numbers of places.
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
    """What one process measures: a mixer, a value of `WORKS`, and a length or position."""

    mixer: str
    work: str
    length: int


@dataclass(frozen=True)
class CellResult:
    """What a cell gave.

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

    def figures(self, mixer: str) -> list[Figure]:
        """The rates of one mixer's recurrences."""
        return figures(self.rates.get(mixer, []))

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
            lists = ("seconds", "limit_seconds")
            self.rates[mixer] = [
                Record(**record | {name: tuple(record[name]) for name in lists})
                for record in records
            ]


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
        What is measured next, in words, before it is; nothing for what the report has.
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
        _, found = measure("mixer", arguments, settings.threads, settings.seconds)
    except TimeoutError:
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
        found += measure("mixer rates", arguments, settings.threads)[0]
    return found


def _load() -> float:
    return os.getloadavg()[0]


def slope(values: Mapping[int, float | None]) -> float | None:
    """The power of the length with which something grows: that of a line fitted to logarithms.

    Args:
        values: By length; `None` where there is none. Those of the greatest lengths count, as far down
            as a sixteenth of it.

    Returns:
        The power, or `None` where fewer than three values count.
    """
    known = {length: value for length, value in values.items() if value}
    counted = {n: known[n] for n in known if n * _SLOPE_SPAN >= max(known)}
    if len(counted) < 3:
        return None
    power, _ = np.polyfit(np.log([*counted]), np.log([*counted.values()]), 1)
    return float(power)
