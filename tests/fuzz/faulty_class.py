"""A class whose cases fail in every way that the fuzzer must notice, one a seed."""

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mlx_mmfree.errors import CheckpointError
from tests.fuzz.case import OUTSIDE, FuzzClass, Late


def _refuse(message: str) -> None:
    raise CheckpointError(message)


def _write(file: Path) -> None:
    file.write_text("x")


def _be_late() -> None:
    raise Late("it took too long")


def _loop() -> None:
    while True:
        pass


def _recurse(depth: int = 0) -> int:
    return _recurse(depth + 1) + 1


FAULTS: dict[str, Callable[[Path], object]] = {
    "": lambda case: None,
    "refused": lambda case: _refuse("[case] it is refused in one clear line."),
    "unclear message": lambda case: _refuse("two\nlines, which is one too many"),
    "ZeroDivisionError": lambda case: 1 // 0,
    "RecursionError": lambda case: _recurse(),
    "MemoryError": lambda case: bytes(2**36),
    "MB of memory": lambda case: b"x" * 300_000_000,
    "processor time": lambda case: _loop(),
    "took too long": lambda case: _be_late(),
    "was not done": lambda case: time.sleep(1000),
    "signal 6": lambda case: os.abort(),
    "status 3": lambda case: os._exit(3),
    "printed": lambda case: print("x", flush=True),
    "changed files outside": lambda case: _write(case.parent / OUTSIDE / "new.txt"),
    "temporary files": lambda case: tempfile.mkdtemp(),
    "beside its folder": lambda case: _write(case.parent / "new.txt"),
}


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    target.mkdir()
    [number] = (n for n in range(len(FAULTS)) if random.Random(n).getstate() == rng.getstate())
    return list(FAULTS)[number]


def exercise(folder: Path, rng: random.Random) -> None:
    [number] = (n for n in range(len(FAULTS)) if random.Random(n).getstate() == rng.getstate())
    list(FAULTS.values())[number](folder)


CLASS = FuzzClass(
    lambda folder: None,
    mutate,
    exercise,
    cpu_seconds=0,
    wall_seconds=3,
    memory_bytes=250_000_000,
)
