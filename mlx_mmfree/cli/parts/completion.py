"""Completes commands and flags in a shell. Needs the package argcomplete (extra 'completion')."""

import argparse
import importlib
import os
from collections.abc import Sequence

ENVIRONMENT_VARIABLE = "_ARGCOMPLETE"
"""The shell sets this variable when it asks for completions."""


def complete(package: str, names: Sequence[str]) -> None:
    """If a shell asks for completions, answers it and ends the process.

    Args:
        package: The package whose modules are the commands.
        names: The names of the commands.
    """
    if ENVIRONMENT_VARIABLE not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(whole_parser(package, names, os.environ.get("COMP_LINE", "")))


def whole_parser(package: str, names: Sequence[str], line: str) -> argparse.ArgumentParser:
    """A parser of all commands. It knows the flags of those commands that `line` names."""
    parser = argparse.ArgumentParser(prog="mmfree", allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    commands.add_parser("help").add_argument("command", choices=names)
    typed = line.split()
    for name in names:
        parents = []
        if name in typed:
            parents = [importlib.import_module(f"{package}.{name}").build_parser()]
        commands.add_parser(name, parents=parents, add_help=not parents, allow_abbrev=False)
    return parser
