"""Starts a Python module as the processes of a group on this machine, as `mlx.launch` does."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
MMFREE = ("-c", "import sys; from mlx_mmfree.cli import main; sys.exit(main(sys.argv[1:]))")
"""Arguments of `python` that run the console program."""


def start_group(folder: Path, size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process for each rank, with the arguments of `python`."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(size)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    (folder / "hosts.json").write_text(json.dumps(hosts))
    variables = {
        "MLX_HOSTFILE": str(folder / "hosts.json"),
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | variables | {"MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout_s: float = 300) -> list[tuple[str, str]]:
    """What each wrote to its two outputs; none is left running."""
    try:
        return [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
