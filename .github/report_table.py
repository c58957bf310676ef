"""Puts the JSON of `mmfree doctor --json` and `mmfree bench --json` from several machines in tables.

`python .github/report_table.py FILE...` prints Markdown. A file holds one such object.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MACHINES = ("file", "device", "memory", "MLX", "system", "kernels switched off", "problems")
_KERNELS = (
    "device",
    "kernel",
    "inputs x outputs",
    "rows",
    "microseconds",
    "GB/s",
    "of a plain read",
)
_FIGURES = ("device", "measurement", "threads", "GB/s", "of its limit", "rate")
_RATIOS = ("device", "measurement", "compared with", "times as fast", "by the best")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = parser.parse_args(argv).files
    reports = {file: _read(parser, file) for file in files}
    machines = [_machine(file, r) for file, r in reports.items() if "versions" in r]
    figures = [row for r in reports.values() if "figures" in r for row in _figures(r)]
    ratios = [row for r in reports.values() for row in _ratios(r)]
    kernels = [row for r in reports.values() for row in _kernels(r)]
    tables = [
        *((_MACHINES, machines), (_KERNELS, kernels)),
        *((_FIGURES, figures), (_RATIOS, ratios)),
    ]
    print("\n\n".join(_table(head, rows) for head, rows in tables if rows))


def _read(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"'{file}' must be a file of JSON but cannot be read: {error}")
    if not isinstance(report, dict) or not {"versions", "figures"} & report.keys():
        parser.error(f"'{file}' must come from 'mmfree doctor --json' or 'mmfree bench --json'")
    return report


def _machine(file: Path, report: dict[str, Any]) -> tuple[str, ...]:
    device, versions = report["device"], report["versions"]
    faults = [f"{name}: {fault}" for name, fault in report["metal_kernels"].items() if fault]
    return (
        file.name,
        f"{device['name']} ({device['backend']})",
        f"{device['memory_bytes'] / 1e9:.0f} GB",
        versions["mlx"],
        versions["platform"],
        "; ".join(faults) or "none",
        str(len(report["problems"])),
    )


def _kernels(report: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            report["device"]["name"],
            time["kernel"],
            f"{time['inputs']} x {time['outputs']}",
            str(time["rows"]),
            f"{time['seconds'] * 1e6:.1f}",
            f"{time['bytes_per_second'] / 1e9:.1f}",
            "" if time["share_of_read"] is None else f"{time['share_of_read']:.0%}",
        )
        for time in report.get("kernel_times", [])
    ]


def _figures(report: dict[str, Any]) -> list[tuple[str, ...]]:
    device = report["machine"]["device"]
    return [
        (
            device,
            figure["name"],
            str(figure["threads"] or "GPU"),
            f"{figure['gb_per_second']:.1f}",
            f"{figure['fraction_of_limit']:.0%} of {figure['limit']}",
            f"{figure['rate']:.1f} {figure['unit']}/s" if figure["unit"] else "",
        )
        for figure in report["figures"]
    ]


def _ratios(report: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            report["machine"]["device"],
            ratio["name"],
            ratio["other"],
            f"{ratio['median']:.2f}",
            f"{ratio['best']:.2f}",
        )
        for ratio in report.get("ratios", [])
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    main()
