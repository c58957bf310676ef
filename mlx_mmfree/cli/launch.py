"""`mmfree launch`: runs a command in several processes on this machine and reports how they ended.

`mlx.launch` can use several machines, but it ends with status 0 even if a process has failed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import NoReturn

from ..errors import UsageError
from ..platform.process_group import start_group
from .parts.command import command
from .parts.commands import main as run_command
from .parts.flags import positive
from .parts.parser import CommandParser
from .parts.registry import command_names

HELP = "run a command in several processes on this machine"

_GRACE_S = 30.0
_POLL_S = 0.02
_SIGNALLED = 128


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree launch", description=__doc__)
    parser.add_argument(
        "-n", "--processes", type=positive, default=2, help="number of processes (2)"
    )
    parser.add_argument(
        "--backend",
        choices=("ring", "mpi"),
        default="ring",
        help="what connects them: MLX's ring, or Open MPI, whose 'mpirun' then starts them (ring)",
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
    if args.backend == "mpi":
        _become_mpirun(args.processes, words)
    with tempfile.TemporaryDirectory() as folder:
        processes = start_group(
            [sys.executable, "-m", "mlx_mmfree.cli.launch", str(os.getpid()), *words],
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

    Each that does not end with status 0 is reported on stderr.

    Args:
        processes: One process for each rank, each in a session of its own.
        grace_s: Seconds that the others have to notice the failure, and then to end when asked to.

    Returns:
        0 if all ended with status 0, else the status of the first that did not; of several found at
        once, of one that SIGKILL ended. For a process that a signal ended, it is 128 plus the number of
        the signal.
    """
    status, deadline = 0, float("inf")
    requests = [signal.SIGTERM, signal.SIGKILL]
    left = set(range(len(processes)))
    while left:
        ended = _ended(processes, left)
        left -= ended
        codes = {rank: processes[rank].returncode for rank in sorted(ended)}
        # those that end together with a killed one have noticed its loss
        for rank in sorted(codes, key=lambda rank: codes[rank] != -signal.SIGKILL):
            if not codes[rank]:
                continue
            print(f"Process {rank} of {len(processes)} {_how(codes[rank])}.", file=sys.stderr)
            # what it started itself may still run
            _send(processes[rank], signal.SIGKILL)
            if not status:
                status, deadline = _status(codes[rank]), time.monotonic() + grace_s
        if requests and time.monotonic() >= deadline:
            number = requests.pop(0)
            deadline += grace_s
            for other in left:
                _send(processes[other], number)
        if left:
            time.sleep(_POLL_S)
    return status


def _ended(processes: Sequence[subprocess.Popen[str]], ranks: Set[int]) -> set[int]:
    """Those that have ended, with each whose end another of them may have noticed."""
    ended = {rank for rank in ranks if processes[rank].poll() is not None}
    return {rank for rank in ranks if processes[rank].poll() is not None} if ended else ended


def _send(process: subprocess.Popen[str], number: int) -> None:
    """Sends a signal to a process, and SIGKILL to all that it has started too."""
    if number != signal.SIGKILL:
        process.send_signal(number)
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _how(code: int) -> str:
    if code > 0:
        return f"ended with status {code}"
    return f"was ended by {signal.Signals(-code).name} (status {_status(code)})"


def _status(code: int) -> int:
    return code if code >= 0 else _SIGNALLED - code


def _become_mpirun(processes: int, words: Sequence[str]) -> NoReturn:
    """Replaces this program by `mpirun`, which passes signals on and ends with the right status."""
    program = shutil.which("mpirun")
    if program is None:
        raise UsageError(
            "[launch] 'backend' must be ring where there is no 'mpirun' but got 'mpi'. Install Open "
            "MPI, or leave the flag out."
        )
    name, *flags = words
    command_line = [sys.executable, "-m", "mlx_mmfree", name, "--backend", "mpi", *flags]
    sys.stdout.flush()
    os.execv(program, [program, "-n", str(processes), *command_line])


@contextmanager
def _passing_signals(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Passes Ctrl-C, SIGTERM and SIGHUP on to the processes inside the `with` block."""

    def hand_on(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, hand_on) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


_PAUSE_S = 1.0


def _end_with(parent: int) -> None:
    """Asks this process to end once the one that has started it is gone."""
    while os.getppid() == parent:
        time.sleep(_PAUSE_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _, launcher, *words = sys.argv
    Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    raise SystemExit(run_command(words))
