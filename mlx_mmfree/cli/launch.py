"""`mmfree launch`: runs a command in several processes on this machine and reports how they ended.

`mlx.launch` can use several machines, but it ends with status 0 even if a process has failed.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import UsageError
from ..platform.process_group import start_group
from .parts.command import CommandParser, command
from .parts.console import command_names
from .parts.flags import positive

HELP = "run a command in several processes on this machine"

_GRACE_S, _PAUSE_S = 30.0, 0.1
_SIGNALLED = 128


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree launch", description=__doc__)
    parser.add_argument(
        "-n", "--processes", type=positive, default=2, help="number of processes (2)"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="a command with its flags, such as: train -c run.yaml",
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words or words[0] not in command_names() or words[0] == "launch":
        known = ", ".join(name for name in command_names() if name != "launch")
        given = repr(words[0]) if words else "nothing"
        raise UsageError(
            f"[launch] the command must be one of {known} but got {given}. An example: mmfree "
            "launch -n 2 train -c run.yaml"
        )
    with tempfile.TemporaryDirectory() as folder:
        processes = start_group(
            [sys.executable, "-m", "mlx_mmfree", *words],
            args.processes,
            Path(folder),
            stdin=subprocess.DEVNULL,
            # in a session of their own, they get Ctrl-C once, from this process
            start_new_session=True,
        )
        with _passing_signals(processes):
            return wait(processes)


def wait(processes: Sequence[subprocess.Popen[str]], grace_s: float = _GRACE_S) -> int:
    """Waits for all processes, and ends those that go on for long after one has failed.

    Args:
        processes: One process for each rank.
        grace_s: Seconds that the others have to notice the failure, and then to end when asked to.

    Returns:
        0 if all ended with status 0, else the status of the first that did not. For a process that a
        signal ended, it is 128 plus the number of the signal.
    """
    status, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes):
        time.sleep(_PAUSE_S)
        for rank, process in enumerate(processes):
            if not status and process.poll():
                status = _status(process)
                deadline = time.monotonic() + grace_s
                print(
                    f"Process {rank} of {len(processes)} ended with status {status}.",
                    file=sys.stderr,
                )
        if time.monotonic() > deadline:
            for process in processes:
                process.terminate()
            if time.monotonic() > deadline + grace_s:
                for process in processes:
                    process.kill()
    return status or next((_status(p) for p in processes if p.returncode), 0)


def _status(process: subprocess.Popen[str]) -> int:
    code = process.returncode
    return code if code >= 0 else _SIGNALLED - code


@contextmanager
def _passing_signals(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Passes Ctrl-C and SIGTERM on to the processes inside the `with` block."""

    def hand_on(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, hand_on) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
