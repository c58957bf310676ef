"""The peak of resident memory is this program's own."""

import subprocess
import sys

import numpy as np

from mlx_mmfree.platform.resident_memory import peak_resident_bytes

SIZE = 64 * 2**20


def test_peak_grows_with_memory_in_use() -> None:
    before = peak_resident_bytes()
    block = np.ones(before + SIZE, np.uint8)
    assert peak_resident_bytes() >= before + SIZE // 2
    del block
    assert peak_resident_bytes() >= before + SIZE // 2


def test_a_new_program_does_not_start_with_our_peak() -> None:
    block = np.ones(8 * SIZE, np.uint8)
    code = (
        "from mlx_mmfree.platform.resident_memory import peak_resident_bytes as peak; print(peak())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < block.nbytes
