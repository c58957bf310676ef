"""Sorts failed tests by their kind: `python .github/failures.py JUNIT_XML...` prints Markdown.

Numbers beyond their tolerance, kernels that their own check switched off, and all else are three lists:
the first two may come from the machine.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

KINDS = {
    "A kernel was switched off by its own check": ("is switched off", "it computes wrong values"),
    "A number is beyond its tolerance": ("relative_error", "TOLERANCE", "assert_allclose"),
}
OTHER = "Other failures"


def kind_of(message: str) -> str:
    """The kind of a failure, by what it says."""
    return next((kind for kind, words in KINDS.items() if any(w in message for w in words)), OTHER)


def failures(file: Path) -> list[tuple[str, str, str]]:
    """The kind, the test and the first line of each failure of a report."""
    found = []
    for case in ElementTree.parse(file).iter("testcase"):
        for failure in [*case.iter("failure"), *case.iter("error")]:
            text = f"{failure.get('message', '')}\n{failure.text or ''}"
            name = f"{case.get('classname')}::{case.get('name')}"
            found.append((kind_of(text), name, failure.get("message", "").partition("\n")[0][:200]))
    return found


def main(*names: str) -> None:
    missing = [name for name in names if not Path(name).exists()]
    if missing:
        print(f"No report of tests was written as {', '.join(missing)}. The log says why.\n")
    found = [each for name in names if name not in missing for each in failures(Path(name))]
    if not found and not missing:
        print("No test failed.")
    for kind in (*KINDS, OTHER):
        if rows := [row for row in found if row[0] == kind]:
            print(f"### {kind}: {len(rows)}\n")
            print(*(f"- `{name}`: {message}" for _, name, message in rows), sep="\n", end="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
