"""Prints one of the README's commands that install, word for word."""

import re
import sys
from pathlib import Path

BEGINNINGS = {
    "environment": "python3 -m venv ",
    "start": "pip install . && ",
    "test": 'pip install ".[test]" && ',
    "uv": "uv tool install ",
    "pipx": "pipx install ",
    "pip": 'pip install "mlx-mmfree',
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
