"""The settings of the C allocator, each in a process of its own, which they hold for."""

import subprocess
import sys
from pathlib import Path

import pytest

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ROLLUP = Path("/proc/self/smaps_rollup")

pytestmark = pytest.mark.skipif(not ROLLUP.exists(), reason="Linux alone lists these sizes")


def printed(program: str) -> list[int]:
    """The numbers that a program prints in a fresh process."""
    run = subprocess.run(
        [sys.executable, "-c", SIZES + program], capture_output=True, text=True, check=True
    )
    return [int(line) for line in run.stdout.splitlines()]


SIZES = f'''
import mlx.core as mx
from mlx_mmfree.platform.allocator import keep_freed_memory, return_freed_memory

def size(name):
    lines = open("{ROLLUP}").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))

def asked():
    """The bytes in memory of mappings with the flag of madvise(2)."""
    found = resident = 0
    for line in open("/proc/self/smaps"):
        if line.startswith("Rss:"):
            resident = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:") and "hg" in line.split():
            found += resident
    return found

def array(mega_bytes):
    result = mx.ones(mega_bytes * 2**18)
    mx.eval(result)
    return result
'''


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="large pages are switched off"
)
def test_arrays_lie_where_the_kernel_was_asked_for_large_pages() -> None:
    """It grants them as far as its memory has whole ones, so that the question is what is tested."""
    before, after = printed(
        """
print(asked())
keep_freed_memory()
kept = [array(1) for _ in range(128)]
print(asked())
"""
    )
    assert before == 0
    assert after > 100 * 2**20


def test_the_heap_takes_no_memory_before_arrays_do() -> None:
    before, after = printed("""print(size("Rss"))
keep_freed_memory()
print(size("Rss"))
""")
    assert after - before < 8 * 2**20


def test_freed_memory_is_kept_until_it_is_returned() -> None:
    full, reused, returned = printed(
        """
keep_freed_memory()
large = array(256)
print(size("Rss"))
del large
print(size("Rss"))
return_freed_memory()
print(size("Rss"))
"""
    )
    assert reused > full - 16 * 2**20
    assert returned < full - 200 * 2**20


def test_a_limit_of_memory_is_no_error() -> None:
    (found,) = printed(
        """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
keep_freed_memory()
print(int(array(64).sum().item()))
"""
    )
    assert found == 64 * 2**18
