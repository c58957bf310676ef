"""Resident memory is reported by its kind, and its peak is this program's own."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlx_mmfree.platform.resident_memory import STATUS, resident_memory

SIZE = 64 * 2**20
IMPORT = "from mlx_mmfree.platform.resident_memory import peak_resident_bytes as peak\n"
GROW = f"""
import numpy as np
before = peak()
block = np.ones(before + {SIZE}, np.uint8)
with_block = peak()
del block
print(before, with_block, peak())
"""


def run(code: str) -> list[int]:
    """The numbers that a new program prints."""
    command = [sys.executable, "-c", IMPORT + code]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(number) for number in finished.stdout.split()]


def test_peak_grows_with_memory_in_use_and_stays() -> None:
    before, with_block, after = run(GROW)
    assert with_block >= before + SIZE // 2
    assert after >= before + SIZE // 2


def test_a_new_program_does_not_start_with_our_peak() -> None:
    block = np.ones(8 * SIZE, np.uint8)
    assert run("print(peak())")[0] < block.nbytes


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells the kinds of memory apart")
def test_mapped_files_and_own_memory_are_reported_apart(tmp_path: Path) -> None:
    np.ones(SIZE, np.uint8).tofile(tmp_path / "file")
    before = resident_memory()
    mapped = np.memmap(tmp_path / "file", np.uint8, "r")
    assert mapped.max() == 1
    with_file = resident_memory()
    # by the system, because an allocator may have memory that was resident before
    with mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for page in range(0, SIZE, mmap.PAGESIZE):
            block[page] = 1
        with_block = resident_memory()
    assert before and with_file and with_block
    assert with_file.mapped_bytes - before.mapped_bytes >= SIZE
    assert with_file.anonymous_bytes - before.anonymous_bytes < SIZE // 4
    assert with_block.anonymous_bytes - with_file.anonymous_bytes >= SIZE // 2
