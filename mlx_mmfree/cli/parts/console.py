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
from typing import Any

from ...errors import UsageError
from ...files.plugins import entry_module, installed
from ...version import __version__
from .command import CommandParser, command

ENVIRONMENT_VARIABLE = "_ARGCOMPLETE"
"""The shell sets this variable when it asks for completions."""


def complete() -> None:
    """If a shell asks for completions, answers it and ends the process."""
    if ENVIRONMENT_VARIABLE not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    line = os.environ.get("COMP_LINE", "")
    argcomplete.autocomplete(whole_parser(line), exclude=older_names(line))


def whole_parser(line: str) -> argparse.ArgumentParser:
    """A parser of all commands. It knows the flags of those commands that `line` names."""
    parser = argparse.ArgumentParser(prog="mmfree", allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    names = command_names()
    commands.add_parser("help").add_argument("command", choices=names)
    typed = line.split()
    for name in names:
        parents = []
        if name in typed:
            parents = [_module(name).build_parser()]
        commands.add_parser(name, parents=parents, add_help=not parents, allow_abbrev=False)
    return parser


def older_names(line: str) -> list[str]:
    """The names of flags that still work and are no longer told, of the commands that `line` names."""
    found = []
    for name in {*line.split()} & {*command_names()}:
        parser = _module(name).build_parser()
        for action in parser._actions if isinstance(parser, CommandParser) else ():
            if action.option_strings:
                found += sorted({*action.option_strings} - {*parser.shown_names(action)})
    return found


_PACKAGE = "mlx_mmfree.cli"
"""Each file of this package, or of a folder on its search path, is a command."""


def command_names() -> list[str]:
    """The names of all commands: the files of their package, and what installed packages add."""
    return sorted({*_own_names(), *(each.name for each in installed("commands"))})


def _own_names() -> list[str]:
    search = importlib.import_module(_PACKAGE).__path__
    return [entry.name for entry in pkgutil.iter_modules(search) if not entry.ispkg]


def _module(name: str) -> Any:
    """The module of a command, or `None`. Those of the package keep their names."""
    if name in _own_names():
        return importlib.import_module(f"{_PACKAGE}.{name}")
    return next((entry_module(each) for each in installed("commands") if each.name == name), None)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mmfree <command> ...` and returns its exit status."""
    complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "--help-all"):
        print(_overview())
    elif name == "--version":
        print(f"mmfree {__version__}")
    elif (module := _module(name)) is not None:
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
    if name not in _own_names():
        return str(getattr(_module(name), "HELP", "a command of an installed package"))
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
        "'mmfree <command> --help' or 'mmfree help <command>' explains the usual flags of a command,",
        "'mmfree <command> --help-all' all of them.",
    ]
    return "\n".join(lines)
