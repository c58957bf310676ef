"""The tables that `mmfree bench mixers` prints."""

from collections.abc import Callable
from math import isqrt
from typing import TYPE_CHECKING

from .terminal import aligned, markdown, size_text

if TYPE_CHECKING:
    from ...evaluation.benchmark_mixers import CellResult, MixerReport

Rows = list[list[str]]
Text = Callable[[float], str]


def mixer_lines(report: "MixerReport", is_markdown: bool = False) -> list[str]:
    """All tables, each below a line that says what it shows."""
    lines = _machine_lines(report)
    for title, rows in [*_length_tables(report), *_decoding_tables(report), *_rate_tables(report)]:
        lines += ["", title, *([""] if is_markdown else [])]
        lines += markdown(_with_code(rows)) if is_markdown else aligned(rows)
    return [*lines, *_reasons(report)]


def _machine_lines(report: "MixerReport") -> list[str]:
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


def _length_tables(report: "MixerReport") -> list[tuple[str, Rows]]:
    from ...evaluation.benchmark_mixers import DECODING

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


def _lengths(report: "MixerReport", work: str, name: str, text: Text) -> Rows:
    from ...evaluation.benchmark_mixers import Cell, slope

    values = report.values(work, name)
    lengths = sorted({length for own in values.values() for length in own})
    rows = [["mixer", *(_size_of(report, length) for length in lengths), "slope"]]
    for mixer, own in values.items():
        results = [report.cells.get(Cell(mixer, work, length)) for length in lengths]
        power = slope(own)
        cells = [_cell(report, result, name, text) for result in results]
        rows.append([mixer, *cells, "" if power is None else f"{power:.2f}"])
    return rows


def _size_of(report: "MixerReport", length: int) -> str:
    """A length, or the sides of a square map; slopes are those of its places."""
    side = isqrt(length)
    return f"{side} x {side}" if report.settings["is_spatial"] else f"{length:,}"


def _cell(report: "MixerReport", result: "CellResult | None", name: str, text: Text) -> str:
    if result is None:
        return ""
    if result.stopped == "time":
        return f"> {report.settings['seconds']:g} s"
    if result.stopped == "memory":
        return f"> {size_text(report.settings['memory_bytes'])}"
    return "failed" if result.stopped else text(getattr(result, name))


def _decoding_tables(report: "MixerReport") -> list[tuple[str, Rows]]:
    from ...evaluation.benchmark_mixers import DECODING, Cell

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
    return [(f"decoding: {kind} of a token behind so many others, and the size of the state", rows)]


def _rate_tables(report: "MixerReport") -> list[tuple[str, Rows]]:
    rows = [["recurrence", "time", "rate", "limit", "of limit", "in each process"]]
    for mixer in report.rates:
        for figure in report.figures(mixer):
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


def _reasons(report: "MixerReport") -> list[str]:
    from ...evaluation.benchmark_mixers import SKIPPING

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
