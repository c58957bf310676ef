"""Turns functions into commands, with one line for an error, and an exit status."""

import argparse
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from ...errors import MMFreeError, TrainingStopped, UsageError
from ...files import plugins
from ...platform.terminal import clean_terminal
from .parser import MLX_LM

# Names of arguments in the library, and the flags that their values may come from.
_FLAGS_OF_ARGUMENT = {
    "bits": ("kv_bits",),
    "carries_state": ("carry_state",),
    "group_size": ("kv_group_size",),
    "max_size": ("max_kv_size",),
    "path_or_repo": ("model", "draft_model", "teacher", "data"),
    "path": ("output", "model"),
    "repository": ("upload_repo",),
    "sequence_length": ("length",),
    "source": ("plugin",),
    "top_k": ("teacher_top_k",),
}


_FILE = {"-c", "--config"}
"""The flag of a file with settings."""


def with_flags(message: str, parser: argparse.ArgumentParser | None, argv: Sequence[str]) -> str:
    """A message of the library in which the flags of a command replace the arguments' names.

    A function of the library that a message names is left out before a flag, which says it already.
    Where the command was given a file with settings, values that were not typed keep their names.

    Args:
        message: A message of the format `[caller] 'argument' must be … but got ….`
        parser: The parser of the command, or `None` to leave the message as it is.
        argv: The arguments that the command was given.
    """
    # what a file says is no argument
    if parser is None or re.match(r"\[[\w-]+\.json\]", message):
        return message
    actions = _chosen(parser, argv)._actions
    typed = {word.partition("=")[0] for word in argv}
    has_file = any(each.type is Path and _FILE.issubset(each.option_strings) for each in actions)
    flags = {action.dest: _spelled(action, argv) for action in actions if action.option_strings}
    # what follows are values, or keys of a file, which may be quoted too
    end = re.search(r" but | Did you mean ", message)
    rule, given = (message[: end.start()], message[end.start() :]) if end else (message, "")

    # a value that was not typed comes from the file, whose keys have the arguments' names
    names_keys = has_file and not typed.isdisjoint(_FILE) and given.startswith(" but got ")

    def flag(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        if names_keys and name in flags and flags[name] not in typed:
            return match[0]
        names = (name, *_FLAGS_OF_ARGUMENT.get(match[1], ()))
        fitting = [flags[name] for name in names if name in flags]
        reported = [flag for flag in fitting if any(repr(v) in given for v in _values(flag, argv))]
        return next(iter([*reported, *fitting]), match[0])

    rule = re.sub(r"'([a-z][a-z_-]*)'", flag, rule)
    rule = re.sub(rf"^\[(?!{parser.prog.rpartition(' ')[2]}\])\w+\] (?=--)", "", rule)
    return re.sub(r"\w+=\w+ \((--[a-z-]+(?: [A-Z]+)?)\)", r"\1", rule + given)


def _chosen(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of what is named first, where a command has several."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and argv:
            chosen: argparse.ArgumentParser = action.choices.get(argv[0], parser)
            return chosen
    return parser


def _spelled(action: argparse.Action, argv: Sequence[str]) -> str:
    """A flag as it was typed, or else under mlx-lm's name of its setting, or under its first name."""
    names = [text for text in action.option_strings if text.startswith("--")]
    typed = {word.partition("=")[0] for word in argv}
    known = [name for name in names if name in typed]
    own = [name for name in names if name in MLX_LM and name[2:].replace("-", "_") == action.dest]
    return [*known, *own, *names][0]


def _values(flag: str, argv: Sequence[str]) -> list[str]:
    """The values that directly follow a flag."""
    follows = [after for word, after in pairwise(argv) if word == flag]
    return follows + [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]


def check_writable(argument: str, file: Path, *, makes_folder: bool = False) -> None:
    """Refuses a file that cannot be created or replaced.

    Args:
        argument: The command in brackets, and the argument that names the file in quotes.
        file: The file that will be written.
        makes_folder: Whether missing folders will be created too.

    Raises:
        UsageError: The file's folder is missing or not writable, or the file is a folder itself.
    """
    file = file.expanduser()
    folder = file.parent
    while makes_folder and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if file.is_dir():
        reason = "is a folder"
    elif not folder.is_dir():
        reason = f"cannot be made: there is no folder '{folder}'"
    elif not os.access(folder, os.W_OK):
        reason = f"cannot be made: '{folder}' may not be written to"
    else:
        return
    raise UsageError(f"{argument} must be a file that can be written but '{file}' {reason}.")


class Command(Protocol):
    """Runs with the given arguments, or with the process's, and returns an exit status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


@contextmanager
def argument_errors() -> Iterator[None]:
    """Raises `UsageError` for a `ValueError` of the library, whose argument came from the user."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def command(main: Callable[[Sequence[str] | None], int]) -> Command:
    """Makes a command report what the user can mend: by one line on stderr and an exit status.

    This covers the library's own errors, errors of the system (a full disk, a file without write
    permission, a closed pipe), sizes beyond memory, errors in a plug-in and Ctrl-C. Other errors keep
    their traceback.
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
            _discard_output()
            print(file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            _discard_output()
            return BROKEN_PIPE
        except OSError as error:
            _discard_output()
            _report(str(MMFreeError(f"the system refused: {error}.")))
            return USER_ERROR
        except (MemoryError, OverflowError) as error:
            _discard_output()
            _report(
                str(
                    MMFreeError(
                        "what was asked for must fit into memory, and its sizes into 32 bits, but does "
                        f"not: {error or 'there is no memory left'}."
                    )
                )
            )
            return USER_ERROR
        except Exception as error:
            if presses and _happened_in_import(error):
                print(file=sys.stderr)
                return INTERRUPTED
            if (failure := plugins.failure(error)) is None:
                raise
            _report(str(MMFreeError(f"[plugin] a plug-in must run without errors but {failure}.")))
            return USER_ERROR

    return run


@contextmanager
def _counted_interrupts(presses: list[int]) -> Iterator[None]:
    """Records each Ctrl-C inside the `with` block in `presses`, and raises `KeyboardInterrupt`."""
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
    """Returns whether an import failed: packages may turn Ctrl-C during an import into another error."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ImportError) or any(
        frame.f_code.co_name == "<module>" for frame, _ in frames
    )


def _report(message: str) -> None:
    with suppress(OSError):
        print("error:", " ".join(message.split()), file=sys.stderr)


def _prepare_streams() -> None:
    """Makes the standard streams accept any text, and replaces those that are closed.

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
        # a stream that was already read from cannot be reconfigured
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "replace":
            with suppress(io.UnsupportedOperation):
                # a terminal that is not UTF-8 shows '?' for characters that it lacks
                stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Discards output that cannot be written, which would make the interpreter fail at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
