"""The console program `mmfree`: finds commands by their file names, and completes them in a shell."""

import argparse
import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ...version import __version__
from .command import command

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


_PACKAGE = "mlx_mmfree.cli"
"""Each file of this package, or of a folder on its search path, is a command."""


def command_names() -> list[str]:
    """The names of all commands, from the files of their package."""
    search = importlib.import_module(_PACKAGE).__path__
    return sorted(entry.name for entry in pkgutil.iter_modules(search) if not entry.ispkg)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mmfree <command> ...` and returns its exit status."""
    complete(_PACKAGE, command_names())
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_overview())
    elif name == "--version":
        print(f"mmfree {__version__}")
    elif name in command_names():
        module = importlib.import_module(f"{_PACKAGE}.{name}")
        status: int = module.main(arguments[1:])
        return status
    else:
        known = ", ".join(command_names())
        raise UsageError(
            f"[mmfree] the command must be one of {known} but got {name!r}. See 'mmfree --help'."
        )
    return 0


def _help(name: str) -> str:
    """The text of `HELP` in a command's file, read without the half second that imports would take."""
    source = importlib.util.find_spec(f"{_PACKAGE}.{name}")
    text = Path(str(source and source.origin)).read_text(encoding="utf-8")
    return next(
        str(ast.literal_eval(line.value))
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "HELP"
    )


def _overview() -> str:
    lines = ["usage: mmfree <command> [flags]", ""]
    for name in command_names():
        lines.append(f"  {name:14}{_help(name)}")
    lines += [
        "",
        "'mmfree <command> --help' or 'mmfree help <command>' lists the flags of a command.",
    ]
    return "\n".join(lines)
