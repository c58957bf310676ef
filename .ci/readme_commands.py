"""Prints one of the README's commands that install, word for word."""

import re
import sys
from pathlib import Path

PREFIXES = {
    "environment": "python3 -m venv ",
    "start": 'pip install ".[serve]" && ',
    "test": 'pip install ".[test]" && ',
    "uv": "uv tool install ",
    "pipx": "pipx install ",
    "pip": 'pip install "mlx-mmfree',
}


def main(name: str) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    text, *blocks = re.split(r"^```", readme, flags=re.MULTILINE)
    commands = [line for block in blocks[::2] for line in block.splitlines()[1:]]
    commands += re.findall(r"`([^`\n]+)`", "".join([text, *blocks[1::2]]))
    lines = [command for command in commands if command.startswith(PREFIXES[name])]
    if len(lines) != 1:
        sys.exit(f"README.md must have one command that begins '{PREFIXES[name]}', not {lines}")
    print(lines[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
