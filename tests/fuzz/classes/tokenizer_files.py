"""Damaged tokenizer files."""

import random
import shutil
from pathlib import Path

from tests.fuzz.case import FuzzClass
from tests.fuzz.hostile import damage_bytes, damage_json
from tests.fuzz.tokenizing import use_tokenizer
from tests.hub.checkpoints import GOLDENS


def make_sources(folder: Path) -> None:
    """A SentencePiece and a byte-level tokenizer."""
    for kind in ("tokenizer_spm", "tokenizer_bpe"):
        ignored = shutil.ignore_patterns("*golden*")
        shutil.copytree(GOLDENS / kind, folder / kind, ignore=ignored)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Damages one of the files of one of the tokenizers."""
    source = rng.choice(sorted(sources.iterdir()))
    shutil.copytree(source, target)
    file = rng.choice(sorted(target.iterdir()))
    damage = damage_json if file.suffix == ".json" and rng.random() < 0.7 else damage_bytes
    file.write_bytes(damage(file.read_bytes(), rng))
    return f"{damage.__name__} of {file.name} in {source.name}"


CLASS = FuzzClass(make_sources, mutate, use_tokenizer)
