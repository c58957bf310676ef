"""Prints one of the commands with which the README begins, word for word."""

import re
import sys
from pathlib import Path

BEGINNINGS = {
    "environment": "python3 -m venv ",
    "start": "pip install . && ",
    "test": 'pip install ".[test]" && ',
}


def main(name: str) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith(BEGINNINGS[name])
    ]
    if len(lines) != 1:
        sys.exit(f"README.md must have one command that begins '{BEGINNINGS[name]}', not {lines}")
    print(lines[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
