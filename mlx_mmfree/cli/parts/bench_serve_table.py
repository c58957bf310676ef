"""The tables that `mmfree bench serve` prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .terminal import aligned, markdown, size_text

if TYPE_CHECKING:
    from ...evaluation.serving.figures import (
        ParkedFigure,
        RateFigure,
        ResumedFigure,
        ServeReport,
        Spread,
    )


def serve_lines(report: "ServeReport", is_markdown: bool) -> list[str]:
    """All tables, and what was left out."""
    table = markdown if is_markdown else aligned
    loads = report.loads
    lines = [
        f"load average while measuring: {min(loads):.1f} to {max(loads):.1f} on {report.processors} "
        "processors"
    ]
    for rows in (
        _rate_rows(report.rates),
        _resumed_rows(report.resumed),
        _parked_rows(report.parked),
    ):
        lines += ["", *table(rows)]
    for each in report.left_out:
        lines += ["", f"{each.program} with {each.clients} clients was not measured: {each.reason}"]
    return lines


def _rate_rows(figures: "Sequence[RateFigure]") -> list[list[str]]:
    """A row for each program and number of clients."""
    heading = ["server", "clients", "tokens/s", "best", "of one client", "of the scheduler"]
    heading += [
        f"{kind}, {which}"
        for kind in ("first piece", "between pieces")
        for which in ("median", "95 %")
    ]
    one = {each.program: each.best for each in figures if each.clients == 1}
    # the one that keeps sessions, as the server does
    scheduler = next(each for each in figures if each.first is None)
    own = figures[0].program
    rows = [heading]
    for figure in figures:
        row = [figure.program, str(figure.clients)]
        row += [f"{figure.tokens_per_second:.0f}", f"{figure.best:.0f}"]
        alone = one.get(figure.program)
        row.append(f"{figure.best / alone:.2f}" if alone else "")
        is_alike = figure.clients == scheduler.clients and figure.program == own
        row.append(f"{figure.best / scheduler.best:.0%}" if is_alike else "")
        rows.append([*row, *_spread(figure.first), *_spread(figure.between)])
    return rows


def _spread(spread: "Spread | None") -> list[str]:
    return ["", ""] if spread is None else [_ms(spread.median), _ms(spread.late)]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _resumed_rows(figure: "ResumedFigure") -> list[list[str]]:
    heading = ["sessions of the server", "bytes", "prompt known"]
    heading += [f"{kind}, {which}" for kind in ("begun", "resumed") for which in ("median", "95 %")]
    row = [str(figure.sessions), size_text(figure.bytes), f"{figure.cached:.0%}"]
    return [heading, [*row, *_spread(figure.asked), *_spread(figure.resumed)]]


def _parked_rows(figures: "Sequence[ParkedFigure]") -> list[list[str]]:
    heading = ["parked", "sessions", "tokens each", "bytes", "resident", "tokenize", "restore"]
    rows = [[*heading, "read new tokens"]]
    for figure in figures:
        resident = figure.resident_bytes
        rows.append(
            [
                figure.name,
                str(figure.sessions),
                str(figure.tokens),
                size_text(figure.bytes),
                "" if resident is None else size_text(resident),
                _ms(figure.tokenize),
                _ms(figure.restore),
                f"{figure.new_tokens} in {_ms(figure.read)}",
            ]
        )
    return rows
