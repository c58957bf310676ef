"""Starts a Python module as the processes of a group on this machine, as `mlx.launch` does."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx

from mlx_mmfree.platform import process_group

ROOT = Path(__file__).parents[1]
MMFREE = ("-c", "import sys; from mlx_mmfree.cli import main; sys.exit(main(sys.argv[1:]))")
"""Arguments of `python` that run the console program."""


def start_group(folder: Path, size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process for each rank, with the arguments of `python`."""
    return process_group.start_group(
        [sys.executable, *arguments],
        size,
        folder,
        {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def connect() -> mx.distributed.Group:
    """The group of this process, which `start_group` has started."""
    process_group.wait_for_group()
    return mx.distributed.init(strict=True, backend="ring")


def finish(processes: list[subprocess.Popen[str]], timeout_s: float = 300) -> list[tuple[str, str]]:
    """The two outputs of each process; none is left running."""
    try:
        return [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
