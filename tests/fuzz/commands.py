"""Runs commands of `mmfree` in children, and judges what they print and leave."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_mmfree.cli import main
from mlx_mmfree.errors import MMFreeError
from tests.fuzz.hostile import TERMINAL_CONTROLS

USER_ERROR = 2
_OUTPUT = "printed.txt"


class CommandRefused(MMFreeError):
    """A command ended with the status of a user's mistake; holds its last line."""


@dataclass
class Running:
    """A command in a child.

    Attributes:
        process: Its number.
        output: The file of what it prints.
        terminal: The other end of the terminal that it prints to, or None for the file.
    """

    process: int
    output: Path
    terminal: int | None = None

    def wait(self, seconds: float, begun: Callable[[], bool] = lambda: True) -> None:
        """Waits so long after something has begun, or until the process ends."""
        while not (begun() or self._has_ended()):
            time.sleep(0.001)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._has_ended():
            time.sleep(0.002)

    def kill(self, delay_s: float, begun: Callable[[], bool] = lambda: True) -> None:
        """Kills the process a while after something has begun, without warning."""
        self.wait(delay_s, begun)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def _has_ended(self) -> bool:
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.process, options) is not None

    def finish(self) -> str:
        """Waits for the end and returns what was printed.

        Raises:
            CommandRefused: It ended with status 2 and one line that says why.
            AssertionError: It ended in another way, or printed what it must not.
        """
        if self.terminal is not None:
            self.output.write_bytes(_read_terminal(self.terminal))
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        text = self.output.read_bytes().decode(errors="backslashreplace")
        _check_printed(text, is_terminal=self.terminal is not None)
        if status == USER_ERROR:
            last = text.rstrip("\r\n").rpartition("\n")[2]
            if not last.startswith("error: "):
                raise AssertionError(f"status 2 without a message: {text[-500:]!r}")
            raise CommandRefused(last)
        if status:
            raise AssertionError(f"status {status}: {text[-800:]!r}")
        return text


def start(
    arguments: Sequence[str],
    folder: Path,
    prepare: Callable[[], object] = int,
    on_terminal: bool = False,
) -> Running:
    """Starts `mmfree` with arguments in a child.

    Args:
        arguments: The command and its flags.
        folder: Where what it prints is kept.
        prepare: Runs in the child before the command.
        on_terminal: Let it print to a terminal.
    """
    return _start(lambda: main(list(arguments)), folder, prepare, on_terminal)


def run(
    arguments: Sequence[str],
    folder: Path,
    prepare: Callable[[], object] = int,
    on_terminal: bool = False,
) -> str:
    """Runs `mmfree` to its end; see `start` and `Running.finish`."""
    return start(arguments, folder, prepare, on_terminal).finish()


def apart(function: Callable[[], object], folder: Path) -> None:
    """Calls a function in a child, since after a computation a process must not fork.

    Raises:
        AssertionError: The function raised something.
    """

    def call() -> int:
        function()
        return 0

    _start(call, folder).finish()


def _start(
    function: Callable[[], int],
    folder: Path,
    prepare: Callable[[], object] = int,
    on_terminal: bool = False,
) -> Running:
    output = folder / f"{time.monotonic_ns()}-{_OUTPUT}"
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    terminal = None
    if on_terminal:
        os.close(handle)
        terminal, handle = os.openpty()
    process = os.fork()
    if process:
        os.close(handle)
        return Running(process, output, terminal)
    status = 1
    try:
        for number in (1, 2):
            os.dup2(handle, number)
        prepare()
        status = function()
        sys.stdout.flush()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _read_terminal(terminal: int) -> bytes:
    received = b""
    # Linux reports the other end's closing as an error, others as an end
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 65536):
            received += data
    os.close(terminal)
    return received


def _check_printed(text: str, *, is_terminal: bool) -> None:
    """Refuses tracebacks, and orders to a terminal that only a hostile file holds.

    Raises:
        AssertionError: There is one.
    """
    if "Traceback (most recent call last)" in text:
        raise AssertionError(f"traceback: {text[-1200:]!r}")
    for control in TERMINAL_CONTROLS if is_terminal else ():
        if control in text:
            where = text.index(control)
            raise AssertionError(f"printed {control!r}: {text[max(0, where - 200) : where + 80]!r}")


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder, links as what they point to."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
        elif not path.is_dir():
            found[name] = "odd"
    return found
