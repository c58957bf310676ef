"""Prints what the project and the named extras require, one requirement a line."""

import sys
import tomllib
from pathlib import Path


def main(*extras: str) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][e] for e in extras)]
    print(*(requirement for each in lists for requirement in each), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
