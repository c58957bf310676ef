"""`mmfree runs`: compares the logs of training runs, in a table and in a picture."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parts.command import command
from .parts.flags import add_json_flag
from .parts.parser import CommandParser
from .parts.picture_flag import add_picture_flag, check_picture
from .parts.terminal import aligned, size_text

if TYPE_CHECKING:
    from ..training.curve import RunSummary

HELP = "compare training runs in a table and a picture"

_MAX_SETTING = 40


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree runs", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its log"
    )
    add_picture_flag(parser, what="draw the losses of all runs")
    add_json_flag(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_picture("runs", args.picture)
    from ..training.curve import differing_settings, distinct_names, plot_runs, read_run

    runs = [read_run(path) for path in args.runs]
    names = distinct_names(args.runs, runs)
    settings = differing_settings(runs)
    if args.json:
        print(json.dumps({name: _plain(run) for name, run in zip(names, runs, strict=True)}))
    else:
        print("\n".join(aligned([_HEADING, *map(_row, names, runs)])))
        if settings:
            print("\nSettings that differ:")
            cells = {key: map(_shortened, values) for key, values in settings.items()}
            print("\n".join(aligned([["", *names], *([key, *cells[key]] for key in cells)])))
    if args.picture is not None:
        records = {name: run.records for name, run in zip(names, runs, strict=True)}
        plot_runs(records, args.picture)
    return 0


_HEADING = ("run", "steps", "tokens", "loss", "best valid", "at step", "tokens/s", "memory")


def _row(name: str, run: "RunSummary") -> list[str]:
    return [
        name,
        str(run.steps),
        f"{run.tokens:,}",
        _text(run.loss, "{:.4f}"),
        _text(run.best_loss, "{:.4f}"),
        _text(run.best_step, "{}"),
        _text(run.tokens_per_second, "{:,.0f}"),
        "-" if run.peak_memory_bytes is None else size_text(run.peak_memory_bytes),
    ]


def _text(value: float | None, format: str) -> str:
    return "-" if value is None else format.format(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SETTING else text[: _MAX_SETTING - 1] + "…"


def _plain(run: "RunSummary") -> dict[str, Any]:
    values = asdict(run)
    del values["records"], values["name"]
    return values
