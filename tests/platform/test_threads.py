"""Programs whose threads compute end as other programs do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme.documents import sections

ROOT = Path(__file__).parents[2]
# without the cleaning, each run of it dies by SIGABRT in more than half of all cases
_THREADS = """
import mlx.core as mx
from mlx_mmfree.platform.threads import ComputingThread

# one operation, which MLX has no other to fuse with
square = mx.compile(lambda x: x @ x)

def work(number):
    mx.eval(square(mx.ones((3, 3))), mx.random.uniform(shape=(number,)))
    if number % 3 == 0:
        raise SystemExit

threads = [ComputingThread(target=work, args=(n,), daemon=n % 2 == 0) for n in range(1, 33)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
_RUNS = 6


def run_often(code: str) -> None:
    """Runs a program several times, each of which must end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("MLX_DISABLE_COMPILE", None)
    for _ in range(_RUNS):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr


def test_a_program_ends_after_threads_that_computed() -> None:
    run_often(_THREADS)


@pytest.mark.exhaustive
def test_the_threads_of_the_page_end_the_program_properly() -> None:
    [section] = [
        section
        for section in sections(ROOT / "mlx_mmfree" / "generation" / "README.md")
        if section.title == "Threads of your own"
    ]
    [code] = section.blocks("python")
    run_often(code)
