"""Token files: odd headers, ids and sizes, and batches drawn from those that are accepted."""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mlx_mmfree.training.corpus.mixture import EpochMixture, RandomMixture, Stage
from mlx_mmfree.training.corpus.tokenize import HEADER_BYTES, TokenFileWriter, open_token_file
from tests.fuzz.case import OUTSIDE, FuzzClass
from tests.fuzz.hostile import ODD_VALUES, RAW_JSON, damage_bytes, odd_entry

_VOCABULARY = {"16.tokens": 300, "32.tokens": 100_000}
_LENGTH, _STEPS = 8, 3
_MAGIC_BYTES = 8


def make_sources(folder: Path) -> None:
    """A file with ids of each width."""
    for name, vocab_size in _VOCABULARY.items():
        with open(folder / name, "wb") as stream:
            writer = TokenFileWriter(stream, vocab_size, 0, "ab" * 32)
            writer.add(np.arange(1000) % vocab_size, ["a", "b"])
            writer.finish()


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Damages a copy of a file; some damage keeps the checksum right."""
    target.mkdir()
    name = rng.choice(sorted(_VOCABULARY))
    shutil.copyfile(sources / name, target / name)
    kind = rng.choice(("value", "value", "value", "raw", "ids", "ids", "bytes", "size", "entry"))
    if kind == "entry":
        return odd_entry(target / name, target.parent / OUTSIDE / "secret.txt", rng)
    data = (sources / name).read_bytes()
    header, ids = json.loads(data[_MAGIC_BYTES:HEADER_BYTES]), data[HEADER_BYTES:]
    key = rng.choice((*header, "odd"))
    text = None
    if kind == "value":
        header[key] = rng.choice((*ODD_VALUES, 8, 64, 299, 1 << 16, 1 << 31, 1 << 48, 1 << 62))
    elif kind == "raw":
        text = json.dumps(header | {key: "mark"}).replace('"mark"', rng.choice(RAW_JSON))
    elif kind == "ids":
        # the header tells of any number of ids, with the right checksum
        ids = (ids * 3)[: rng.choice((0, 1, 2, 4, 15, 16, 18, 36, 100, 6000))]
        if rng.random() < 0.5:
            ids = damage_bytes(ids, rng)
        header |= {
            "tokens": len(ids) // (header["bits"] // 8),
            "documents": 1,
            "checksum": hashlib.sha256(ids).hexdigest(),
        }
    written = json.dumps(header) if text is None else text
    data = (data[:_MAGIC_BYTES] + written.encode()).ljust(HEADER_BYTES) + ids
    if kind == "bytes":
        data = damage_bytes(data, rng)
    elif kind == "size":
        data = rng.choice(
            (data[: rng.randrange(len(data))], data + bytes(rng.choice((1, 4, 10**6))))
        )
    (target / name).write_bytes(data)
    return f"{kind} of {key}: {written:.200}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Opens the file and draws rows from it, as a run does."""
    names = [name for name in sorted(_VOCABULARY) if name in os.listdir(folder)]
    path = folder / (names[0] if names else "absent.tokens")
    file = open_token_file(path)
    if len(file.tokens) <= _LENGTH:
        return
    for kind in (RandomMixture, EpochMixture):
        stages = [Stage(1, {path.name: 1})]
        tokens: dict[str, Any] = {path.name: file.tokens}
        mixture = kind(tokens, stages, 0, steps=_STEPS, rows=4, length=_LENGTH)
        for step in range(_STEPS):
            rows = mixture.rows(step)
            assert rows.shape == (4, _LENGTH + 1)
            assert rows.min() >= 0 and rows.max() < file.header.vocab_size


CLASS = FuzzClass(make_sources, mutate, exercise, batch=200)
