"""Threads that load and use tokenizers and models at once, and conversions to one target at once."""

import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.hub import load, load_model, load_tokenizer
from tests.fuzz.base_model import BASES, make_base
from tests.fuzz.case import command_class
from tests.fuzz.classes import tokenizer_files
from tests.fuzz.commands import CommandRefused, contents, start
from tests.fuzz.tokenizing import use_tokenizer

_TEXT = "Once upon a time <|eot_id|> \U0001f600"


def make_sources(folder: Path) -> None:
    """Tokenizers, and models."""
    tokenizer_files.make_sources(folder / "tokenizers")
    for base in BASES:
        make_base(folder / base, base)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Copies a model, and damages a tokenizer that one of the threads loads."""
    base = rng.choice(BASES)
    shutil.copytree(sources / base, target / "model")
    what = tokenizer_files.mutate(sources / "tokenizers", target / "damaged", rng)
    return f"{base}; {what}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Runs several uses at once; each must give what it gives alone."""
    if rng.random() < 0.5:
        _convert_twice(folder, rng)
    errors: list[BaseException] = []
    before = os.fstat(2)
    uses = [
        rng.choice((_load_model, _use_tokenizer, _use_damaged)) for _ in range(rng.choice((2, 4)))
    ]
    barrier = threading.Barrier(len(uses))

    def work(use: Callable[[Path, int], None], seed: int) -> None:
        try:
            barrier.wait()
            for turn in range(3):
                use(folder, seed + turn)
        except BaseException as error:
            errors.append(error)

    numbers = [rng.randrange(1000) for _ in uses]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(uses, numbers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    after = os.fstat(2)
    if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
        raise AssertionError("standard error went elsewhere")


def _load_model(folder: Path, seed: int) -> None:
    model, tokenizer = load(folder / "model")
    logits, _ = model(mx.array([tokenizer.encode(_TEXT)]))
    # an array belongs to the thread that made it until it is evaluated
    if not mx.isfinite(logits).all().item():
        raise AssertionError("logits are not finite")


def _use_tokenizer(folder: Path, seed: int) -> None:
    tokenizer = load_tokenizer(folder / "model")
    ids = tokenizer.encode(_TEXT, add_special_tokens=False, parse_special=False)
    if tokenizer.decode(ids) != _TEXT:
        raise AssertionError("the text changed")


def _use_damaged(folder: Path, seed: int) -> None:
    with suppress(MMFreeError):
        use_tokenizer(folder / "damaged", random.Random(seed))


def _convert_twice(folder: Path, rng: random.Random) -> None:
    """Two conversions to one target: one of them at least is refused or waits, and it is whole."""
    target = folder / "target"
    arguments = ["convert", "--model", str(folder / "model"), "--mlx-path", str(target)]
    arguments += rng.choice(([], ["--overwrite"]))
    endings = []
    for running in [start(arguments, folder) for _ in range(2)]:
        try:
            endings.append(running.finish())
        except CommandRefused as refused:
            endings.append(refused)
    successes = sum(isinstance(ending, str) for ending in endings)
    if not successes or (successes == 2 and "--overwrite" not in arguments):
        raise AssertionError(f"{successes} of two conversions say that they wrote the target")
    load_model(target)
    if left := [name for name in contents(folder) if name.startswith(".")]:
        raise AssertionError(f"left {left[:3]}")


CLASS = command_class(make_sources, mutate, exercise)
