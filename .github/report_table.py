"""Turns reports of machines, which `mmfree doctor --report` writes, into tables.

`python .github/report_table.py FILE...` prints Markdown. Without files it takes those of
`.github/benchmarks`, and `--write` puts their tables into the page of that folder.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "benchmarks"
MARK = "<!-- tables -->\n"
NONE = "No report has been sent yet."

Report = dict[str, Any]
Rows = list[tuple[str, ...]]


def _machines(report: Report) -> Rows:
    machine, versions = report["machine"], report["versions"]
    bad = [each for each in report["kernels"] if each["fault"]]
    faults = [f"{each['kernel']}: {each['fault']}, {each['first_difference']}" for each in bad]
    sound = [each["error"] for each in report["kernels"] if not each["fault"]]
    errors = [error for error in sound if error is not None]
    return [
        (
            machine["chip"],
            f"{machine['memory_gib']} GB",
            machine["system"],
            versions["mlx_mmfree"],
            versions["mlx"],
            f"{len(sound)}" + (f" (error at most {max(errors):.1g})" if errors else ""),
            "; ".join(faults) or "none",
            str(len(report["problems"])),
        )
    ]


def _rates(report: Report) -> Rows:
    return [
        (
            report["machine"]["chip"],
            f"{report['machine']['memory_gib']} GB",
            rate["model"],
            rate["what"],
            str(rate["threads"] or "GPU"),
            f"{rate['tokens_per_second']:,.1f}",
            f"{rate['share_of_limit']:.0%}",
        )
        for rate in report["rates"]
    ]


def _kernel_times(report: Report) -> Rows:
    return [
        (
            report["machine"]["chip"],
            time["kernel"],
            f"{time['inputs']} x {time['outputs']}",
            str(time["rows"]),
            f"{time['seconds'] * 1e6:.1f}",
            f"{time['bytes_per_second'] / 1e9:.1f}",
            "" if time["share_of_read"] is None else f"{time['share_of_read']:.0%}",
        )
        for time in report["kernel_times"]
    ]


_MACHINE = ("chip", "memory", "system", "mlx_mmfree", "MLX", "sound kernels", "faults", "problems")
_RATE = ("chip", "memory", "model", "measured", "threads", "tokens/s", "of the limit")
_TIME = ("chip", "kernel", "inputs x outputs", "rows", "microseconds", "GB/s", "of a plain read")
TABLES: list[tuple[tuple[str, ...], Callable[[Report], Rows]]] = [
    (_MACHINE, _machines),
    (_RATE, _rates),
    (_TIME, _kernel_times),
]


def tables(files: Sequence[Path]) -> str:
    """The tables of the reports in Markdown; a sentence where there is none.

    Raises:
        ValueError: A file is no report.
    """
    reports = [_read(file) for file in files]
    if not reports:
        return NONE
    made = [(head, [row for report in reports for row in rows(report)]) for head, rows in TABLES]
    return "\n\n".join(_table(head, rows) for head, rows in made if rows)


def _read(file: Path) -> Report:
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        for _, rows in TABLES:
            rows(report)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"'{file}' must be a report that 'mmfree doctor --report' wrote: {error!r:.200}"
        ) from error
    return dict(report)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    args = parser.parse_args(argv)
    try:
        text = tables(args.files or sorted(folder.glob("*.json")))
    except ValueError as error:
        parser.error(str(error))
    if args.write:
        page = folder / "README.md"
        above = page.read_text(encoding="utf-8").partition(MARK)[0]
        page.write_text(f"{above}{MARK}{text}\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
