"""Makes the table of this folder's measurements: `python .github/benchmarks/make_table.py [--write]`.

It prints Markdown, and with `--write` puts it below the mark in `README.md`.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MARK = "<!-- table -->\n"
NONE = "No measurement has been sent yet."
NAME = re.compile(r"[a-z0-9.-]+_\d+-gb_[a-z0-9.-]+(_\d+)?\.json")
HEAD = ("chip", "memory", "system", "model", "measured", "threads", "tokens/s", "of the limit")
HEAD += ("mlx_mmfree", "MLX")
_TEMPLATE = FOLDER / "template.json"


def measurements(folder: Path = FOLDER) -> list[Path]:
    """The files that were sent, by name."""
    return sorted(set(folder.glob("*.json")) - {folder / _TEMPLATE.name})


def faults(file: Path) -> list[str]:
    """What is wrong with a file: its name, or how it differs in form from the template."""
    found = [] if NAME.fullmatch(file.name) else ["its name is not as README.md says"]
    report, template = json.loads(file.read_text()), json.loads(_TEMPLATE.read_text())
    found += _differences(report, template, "the file")
    if not found:
        for row in report["figures"]:
            found += _differences(row, template["figures"][0], "a figure")
    return found


def _differences(given: Any, form: Mapping[str, Any], what: str) -> list[str]:
    if not isinstance(given, dict) or given.keys() != form.keys():
        return [f"{what} has not the keys {', '.join(form)}"]
    return [
        f"{what}'s {key!r} is no {type(value).__name__}"
        for key, value in form.items()
        if type(given[key]) is not type(value)
    ]


def table(files: Sequence[Path]) -> str:
    """The table in Markdown, a row for each figure; a sentence where there is no file."""
    if not files:
        return NONE
    rows: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    for file in files:
        report = json.loads(file.read_text())
        for row in report["figures"]:
            cells = [report["chip"], f"{report['memory_gib']} GB", report["system"]]
            cells += [report["model"], row["what"], str(row["threads"] or "GPU")]
            cells += [f"{row['tokens_per_second']:,.1f}", f"{row['share_of_limit']:.0%}"]
            rows.append([*cells, report["mlx_mmfree"], report["mlx"]])
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    is_written = parser.parse_args(argv).write
    files = measurements(folder)
    for file in files:
        if wrong := faults(file):
            parser.error(f"{file.name}: {'; '.join(wrong)}")
    text = table(files)
    if is_written:
        page = folder / "README.md"
        page.write_text(f"{page.read_text().partition(MARK)[0]}{MARK}{text}\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
