"""Damaged and odd Maples and MiniCPMs: numbered experts, kinds of layers, rotations of their own."""

import json
import random
import re
import shutil
from functools import partial
from pathlib import Path

import mlx.core as mx

from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.checkpoints import (
    NUMBERS,
    odd_config,
    odd_header,
    odd_tensors,
    odd_values,
)
from tests.fuzz.hostile import ODD_VALUES
from tests.fuzz.loading import Mutation, damaged_copy, load_and_run
from tests.hub.checkpoints import GOLDENS

_SOURCES = {
    "maple_hf": "tokenizer_bpe",
    "maple_mlx_2bit": "tokenizer_bpe",
    "bitcpm_minicpm": "tokenizer_spm",
    "bitcpm_minicpm_tied": "tokenizer_spm",
}
_EXPERT = re.compile(r"(experts\.)[0-9]+")
_NUMBERS = ("0", "1", "5", "00", "-1", "4096", "99999999999999999999", "", "x")


def make_sources(folder: Path) -> None:
    for name, tokenizer in _SOURCES.items():
        shutil.copytree(
            GOLDENS / name,
            folder / name,
            ignore=shutil.ignore_patterns("golden.*"),
            copy_function=shutil.copyfile,
        )
        for file in (GOLDENS / tokenizer).glob("tokenizer*"):
            shutil.copyfile(file, folder / name / file.name)


def odd_expert(folder: Path, rng: random.Random) -> str:
    """Numbers an expert in another way, or gives the matrices of experts other shapes or dtypes."""
    file = folder / "model.safetensors"
    tensors = mx.load(str(file))
    mx.eval(tensors)
    name = rng.choice(sorted(key for key in tensors if ".mlp." in key))
    array, new = tensors.pop(name), name
    kind = rng.choice(("number", "number", "copy", "shape", "dtype", "lost"))
    if kind in ("number", "copy"):
        new = _EXPERT.sub(lambda found: found[1] + rng.choice(_NUMBERS), name)
        tensors |= {new: array} | ({name: array} if kind == "copy" else {})
    elif kind == "shape":
        shapes = (array[:-1], array[..., :-1], array[None], array[:0], mx.concatenate([array] * 3))
        tensors[name] = mx.contiguous(rng.choice(shapes))
    elif kind == "dtype":
        tensors[name] = array.astype(rng.choice((mx.float32, mx.float16, mx.uint32, mx.uint8)))
    mx.save_safetensors(str(file), tensors)
    return f"{kind}: {name} as {new}"


def odd_part(folder: Path, rng: random.Random) -> str:
    """Sets one entry of a list or section of the description to an odd value."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    key = rng.choice([key for key, value in config.items() if isinstance(value, list | dict)])
    inner = config[key]
    index = rng.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
    if isinstance(inner[index], list | dict) and rng.random() < 0.7:
        inner = inner[index]
        index = rng.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
    inner[index] = rng.choice((*NUMBERS, *ODD_VALUES, "full_attention", "longrope"))
    file.write_text(json.dumps(config))
    return f"{index!r} in {key!r} = {inner[index]!r:.80}"


MUTATIONS: tuple[Mutation, ...] = (
    odd_config,
    odd_config,
    odd_part,
    odd_part,
    odd_expert,
    odd_expert,
    odd_header,
    odd_values,
    odd_tensors,
)
CLASS = FuzzClass(make_sources, partial(damaged_copy, MUTATIONS), load_and_run)
