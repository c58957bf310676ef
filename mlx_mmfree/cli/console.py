"""The console program `mmfree`: finds commands by file name and reports mistakes on one line."""

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import NoReturn

from ..errors import MMFreeError, UsageError
from ..version import __version__

Command = Callable[[Sequence[str] | None], int]

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_NOT_COMMANDS = {
    "bench_table",
    "console",
    "flags",
    "loading",
    "process_group",
    "prompts",
    "sampling",
}


class CommandParser(argparse.ArgumentParser):
    """A parser that reports a mistake as `UsageError`, without the list of flags."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See '{self.prog} --help'.")


@contextmanager
def argument_errors() -> Iterator[None]:
    """Turns the library's refusal of an argument into the user's mistake."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def command(main: Callable[[Sequence[str] | None], int]) -> Command:
    """Makes a command end with one line on stderr and a status where the user can mend things."""

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            status = main(argv)
            sys.stdout.flush()
            return status
        except MMFreeError as error:
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            return USER_ERROR
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # The interpreter flushes stdout once more when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE

    return run


def command_names() -> list[str]:
    """The commands, by the files of this package."""
    search = importlib.import_module(__package__ or "").__path__
    return sorted(
        entry.name for entry in pkgutil.iter_modules(search) if entry.name not in _NOT_COMMANDS
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mmfree <command> ...` and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_overview())
    elif name == "--version":
        print(f"mmfree {__version__}")
    elif name in command_names():
        module = importlib.import_module(f"{__package__}.{name}")
        status: int = module.main(arguments[1:])
        return status
    else:
        known = ", ".join(command_names())
        raise UsageError(f"[mmfree] the command must be one of {known} but got {name!r}.")
    return 0


def _overview() -> str:
    lines = ["usage: mmfree <command> [flags]", ""]
    for name in command_names():
        lines.append(f"  {name:14}{importlib.import_module(f'{__package__}.{name}').HELP}")
    lines += ["", "'mmfree <command> --help' lists the flags of a command."]
    return "\n".join(lines)
