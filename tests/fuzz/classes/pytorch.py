"""Damaged PyTorch checkpoints: the zip file, and the pickle in it."""

import itertools
import pickletools
import random
from functools import partial
from pathlib import Path
from typing import Any

from mlx_mmfree.hub import save_model
from tests.files.torch_files import change_part, read_parts, to_torch_checkpoint, write_zip
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.checkpoints import (
    damaged_json,
    damaged_weights,
    odd_config,
    odd_file,
    truncated_weights,
)
from tests.fuzz.hostile import damage_bytes
from tests.fuzz.loading import Mutation, damaged_copy, load_and_run
from tests.hub.checkpoints import GOLDENS, tiny_model

NAMES = ("../0", "/dev/zero", "a\\b", "model/data.pkl", "model/data/1", "")


def make_sources(folder: Path) -> None:
    """PyTorch files, one and several."""
    tokenizer = GOLDENS / "tokenizer_bpe"
    model = tiny_model(vocab_size=640, hidden_size=16, intermediate_size=24)
    for kind, shards in (("torch", 1), ("torch_shards", 2)):
        save_model(folder / kind, model, tokenizer)
        to_torch_checkpoint(folder / kind, shards=shards)


def _weights(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.bin")))


def odd_pickle(folder: Path, rng: random.Random) -> str:
    """Damages the instructions that describe the tensors; the zip file stays sound."""
    file = _weights(folder, rng)
    parts = read_parts(file)
    [pickle] = (part for part in parts if part.name.endswith("data.pkl"))
    if rng.random() < 0.3:
        what, text = "bytes", damage_bytes(pickle.content, rng)
    else:
        what, text = _odd_instructions(pickle.content, rng)
    write_zip(file, change_part(parts, pickle.name, content=text))
    return f"{what} in {file.name}"


def _odd_instructions(text: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Removes, repeats, exchanges or replaces some instructions."""
    starts = [position for _, _, position in pickletools.genops(text)]
    spans = [text[i:j] for i, j in itertools.pairwise([*starts, len(text)])]
    values = (b"N", b")", b"}", b"]", b"(", b"0", b"2", b"R", b"b", b"Q", b"K\0", b"J\0\0\0\x80")
    values += (
        b"M\xff\xff",
        b"J\xff\xff\xff\x7f",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"cos\nsystem\n",
    )
    values += (b"r\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f", b"ctorch\nLongStorage\n", b"\x93")
    kinds = []
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at, other = rng.randrange(len(spans)), rng.randrange(len(spans))
        kinds.append(rng.choice(("remove", "repeat", "exchange", "replace", "insert")))
        if kinds[-1] == "remove":
            spans[at] = b""
        elif kinds[-1] == "repeat":
            spans[at] *= rng.choice((2, 3, 5000))
        elif kinds[-1] == "exchange":
            spans[at], spans[other] = spans[other], spans[at]
        elif kinds[-1] == "replace":
            spans[at] = rng.choice(values)
        else:
            spans[at] += rng.choice(values)
    return ", ".join(kinds), b"".join(spans)


def odd_directory(folder: Path, rng: random.Random) -> str:
    """Changes what the headers of a zip file say about an entry."""
    file = _weights(folder, rng)
    parts = read_parts(file)
    part = rng.choice(parts)
    field = rng.choice(("name", "method", "flags", "crc", "size", "local_name", "start", "content"))
    value: Any = rng.choice((0, 1, 8, 255, len(part.content) + 1, 2**31, 2**32 - 1))
    if field in ("name", "local_name"):
        value = rng.choice((*NAMES, rng.choice(parts).name))
    elif field in ("method", "flags"):
        value %= 2**16
    elif field == "content":
        value = rng.choice(
            (b"", part.content[1:], part.content * 2, damage_bytes(part.content, rng))
        )
    changed = change_part(parts, part.name, **{field: value})
    write_zip(file, changed, is_64=rng.random() < 0.3)
    return f"{field} of {part.name}"


MUTATIONS: tuple[Mutation, ...] = (
    odd_pickle,
    odd_pickle,
    odd_pickle,
    odd_directory,
    odd_directory,
    damaged_weights,
    truncated_weights,
    odd_config,
    damaged_json,
    odd_file,
)
CLASS = FuzzClass(make_sources, partial(damaged_copy, MUTATIONS), load_and_run)
