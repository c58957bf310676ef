"""The peak of resident memory is this program's own."""

import subprocess
import sys

import numpy as np

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
