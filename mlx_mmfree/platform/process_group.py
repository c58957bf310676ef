"""Starts several processes on this machine as a group that MLX's ring backend connects."""

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any


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
        folder: The folder for the list of addresses. The file must stay until all processes have
            started.
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
        file = folder / "hosts.json"
        file.write_text(json.dumps(hosts))
        shared["MLX_HOSTFILE"] = str(file)
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
