"""Starts several processes on this machine as a group that MLX's ring backend connects."""

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_FOLDER = "MLX_MMFREE_GROUP_FOLDER"
_TIMEOUT_S, _PAUSE_S = 300.0, 0.02


def start_group(
    command: Sequence[str],
    size: int,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> list[subprocess.Popen[str]]:
    """Starts a command once for each rank.

    Args:
        command: The program and its arguments.
        size: The number of processes.
        folder: The folder for the list of addresses, which must stay until all processes have
            started. Each call makes a folder of its own in it.
        variables: Further variables of the environment.
        options: Further arguments of `subprocess.Popen`.

    Raises:
        OSError: A process cannot be started. The others have been ended then.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(size)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    shared = {**os.environ, **(variables or {})}
    # a ring of one process would wait for itself
    if size > 1:
        own = tempfile.mkdtemp(prefix="group-", dir=folder)
        file = Path(own) / "hosts.json"
        file.write_text(json.dumps(hosts))
        shared |= {"MLX_HOSTFILE": str(file), _FOLDER: own}
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(size):
            variables = shared | {"MLX_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=variables, text=True, **options))
    except OSError:
        for process in processes:
            process.kill()
        raise
    return processes


def wait_for_group(timeout_s: float = _TIMEOUT_S) -> None:
    """Waits until all processes of a group that `start_group` has started get here.

    Call it before MLX connects them: a process tries to reach the next one for 15 seconds only, and one
    that waits to be reached does so without end. Other processes do not wait here.

    Args:
        timeout_s: Seconds after which MLX may try it with those that have come.
    """
    if _FOLDER not in os.environ:
        return
    folder = Path(os.environ[_FOLDER])
    size = len(json.loads((folder / "hosts.json").read_text()))
    (folder / f"here-{os.environ['MLX_RANK']}").touch()
    deadline = time.monotonic() + timeout_s
    while len(list(folder.glob("here-*"))) < size and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
