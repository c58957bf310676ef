"""The console program `mmfree`: finds commands by file name and reports mistakes on one line."""

import argparse
import ast
import importlib
import importlib.util
import io
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from ...errors import MMFreeError, TrainingStopped, UsageError, without_credentials
from ...platform.terminal import clean_terminal
from ...version import __version__
from .completion import complete
from .flag_names import with_flags


class Command(Protocol):
    """Runs with arguments, those of the process by default, and returns an exit status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_PACKAGE = "mlx_mmfree.cli"
"""Each file in it, or on its search path, is a command."""


class CommandParser(argparse.ArgumentParser):
    """A parser that reports a mistake as `UsageError`, without the list of flags."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See '{self.prog} --help'.")

    def print_help(self, file: Any = None) -> None:
        """Prints the help; argparse's own passes over an output that refuses it."""
        print(self.format_help(), end="", file=file)


@contextmanager
def argument_errors() -> Iterator[None]:
    """Turns the library's refusal of an argument into the user's mistake."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def command(main: Callable[[Sequence[str] | None], int]) -> Command:
    """Makes a command end with one line on stderr and a status where the user can mend things.

    That is so for the library's own errors, for what the system refuses (a full disk, a file that may
    not be written, standard output that takes nothing more) and for Ctrl-C.
    """

    @clean_terminal()
    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        presses: list[int] = []
        try:
            _prepare_streams()
            try:
                with _counted_interrupts(presses):
                    return main(argv)
            finally:
                sys.stdout.flush()
        except MMFreeError as error:
            build_parser = getattr(sys.modules[main.__module__], "build_parser", None)
            given = sys.argv[1:] if argv is None else argv
            _report(with_flags(str(error), build_parser() if build_parser else None, given))
            return USER_ERROR
        except TrainingStopped as stop:
            print(stop, file=sys.stderr)
            return stop.status
        except KeyboardInterrupt:
            _give_up_output()
            print(file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            _give_up_output()
            return BROKEN_PIPE
        except OSError as error:
            _give_up_output()
            _report(without_credentials(f"the system refused: {error}."))
            return USER_ERROR
        except Exception as error:
            if presses and _happened_in_import(error):
                print(file=sys.stderr)
                return INTERRUPTED
            raise

    return run


@contextmanager
def _counted_interrupts(presses: list[int]) -> Iterator[None]:
    """Appends to `presses` at each Ctrl-C inside the `with` block, which raises as before."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        presses.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _happened_in_import(error: BaseException) -> bool:
    """Whether an import failed; packages make errors of their own of Ctrl-C during theirs."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ImportError) or any(
        frame.f_code.co_name == "<module>" for frame, _ in frames
    )


def _report(message: str) -> None:
    with suppress(OSError):
        print("error:", " ".join(message.split()), file=sys.stderr)


def _prepare_streams() -> None:
    """Makes the streams fit for any text; a closed one is refused or stands for an empty file.

    Raises:
        UsageError: Standard output is closed.
    """
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise UsageError(
            "[mmfree] standard output must be open but is closed. Send it to /dev/null to see nothing."
        )
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # not so where something was read from it before
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "replace":
            with suppress(io.UnsupportedOperation):
                # A terminal that is not UTF-8 shows '?' for what it lacks.
                stream.reconfigure(errors="replace")


def _give_up_output() -> None:
    """Drops what standard output refuses, on which the interpreter would stumble as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command_names() -> list[str]:
    """The commands, by the files of their package."""
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
        raise UsageError(f"[mmfree] the command must be one of {known} but got {name!r}.")
    return 0


def _help(name: str) -> str:
    """What a command's file says in `HELP`; to import all of them would take half a second."""
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
    lines += ["", "'mmfree <command> --help', or 'mmfree help <command>', lists a command's flags."]
    return "\n".join(lines)
