"""The program `mmfree`: its overview, its help, and the command that is called."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ...version import __version__
from .command import command
from .completion import complete
from .registry import _PACKAGE, _own_names, command_module, command_names
from .suggestions import meant_command


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
    elif (module := command_module(name)) is not None:
        status: int = module.main(arguments[1:])
        return status
    else:
        names = command_names()
        meant = meant_command(name, arguments[1:], names)
        known = "those that 'mmfree --help' lists" if meant else ", ".join(names)
        raise UsageError(
            f"[mmfree] the command must be one of {known} but got {name!r}. "
            + (meant or "See 'mmfree --help'.")
        )
    return 0


def _help(name: str) -> str:
    """The text of `HELP` in a command's file, read without the half second that imports would take."""
    if name not in _own_names():
        return str(getattr(command_module(name), "HELP", "a command of an installed package"))
    source = importlib.util.find_spec(f"{_PACKAGE}.{name}")
    text = Path(str(source and source.origin)).read_text(encoding="utf-8")
    return next(
        str(ast.literal_eval(line.value))
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "HELP"
    )


def _overview() -> str:
    lines = [
        "usage: mmfree <command> [flags]",
        "",
        "To begin: 'mmfree chat' talks with the model in the package, 'mmfree run MODEL' with another.",
        "",
    ]
    for name in command_names():
        lines.append(f"  {name:14}{_help(name)}")
    lines += [
        "",
        "'mmfree <command> --help' explains the usual flags of a command, and --help-all all of them.",
    ]
    return "\n".join(lines)
