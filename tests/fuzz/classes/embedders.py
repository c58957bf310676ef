"""Damaged and odd models that embed texts: Qwen3 and Gemma 3 without heads, and files of poolings."""

import json
import random
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlx_mmfree import embed
from mlx_mmfree.generation.embeddings import longest_text
from mlx_mmfree.hub import load
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.checkpoints import (
    NUMBERS,
    damaged_json,
    odd_config,
    odd_header,
    odd_tensors,
    odd_values,
)
from tests.fuzz.hostile import ODD_VALUES, damage_bytes, damage_json, replace_file
from tests.fuzz.loading import Mutation, damaged_copy
from tests.hub.embedder_folder import embedder_folder

_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LONGEST = 20
"""More tokens than a text has here with its prompt."""

_FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")


def make_sources(folder: Path) -> None:
    embedder_folder(folder / "qwen3", pooling="lasttoken", default_prompt="query", max_length=40)
    for name, values in (("older", {}), ("newer", {"rope_parameters": _ROTATIONS})):
        target = folder / name
        embedder_folder(
            target, pooling="mean_tokens", model_type="gemma3_text", max_length=40, **values
        )
        file = target / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))


def odd_layers(folder: Path, rng: random.Random) -> str:
    """Sets what differs from layer to layer, and the rotations of both kinds, to odd values."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    odd = (*NUMBERS, *ODD_VALUES, "linear", "sliding_attention")
    key = rng.choice(("layer_types", "rope_parameters", "sliding_window_pattern", "architectures"))
    value = config.get(key)
    if isinstance(value, list) and value:
        value[rng.randrange(len(value))] = rng.choice(odd)
    elif isinstance(value, dict):
        inner = value[rng.choice(sorted(value))]
        if isinstance(inner, dict):
            inner[rng.choice(("rope_type", "factor", "rope_theta", "type"))] = rng.choice(odd)
        else:
            value[rng.choice(sorted(value))] = rng.choice(odd)
    else:
        value = rng.choice(odd)
    config[key] = value
    file.write_text(json.dumps(config))
    return f"{key} = {value!r:.200}"


def odd_pooling(folder: Path, rng: random.Random) -> str:
    """Damages what sentence-transformers keeps beside a model, or sets one of its values."""
    file = folder / rng.choice((*_FILES, "sentence_bert_config.json"))
    kind = rng.randrange(3)
    if kind < 2:
        file.write_bytes((damage_bytes, damage_json)[kind](file.read_bytes(), rng))
        return f"damage of {file.name}"
    content = json.loads(file.read_text())
    section = rng.choice(content) if isinstance(content, list) else content
    key = rng.choice(sorted(section))
    section[key] = rng.choice((*NUMBERS, *ODD_VALUES, True, "a.Pooling", {"a": 5}, ["query"]))
    file.write_text(json.dumps(content))
    return f"{key!r} of {file.name} = {section[key]!r:.80}"


def odd_member(folder: Path, rng: random.Random) -> str:
    """Removes a file, or replaces it by something else."""
    file = rng.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
    kind = rng.choice(("absent", "empty", "folder", "loop", "pipe"))
    replace_file(file, kind)
    return f"{file.name}: {kind}"


def load_and_embed(folder: Path, rng: random.Random) -> None:
    """Loads a model, which embeds texts unless its files say that it writes them."""
    packed, dtype = rng.random() < 0.7, rng.choice((None, mx.float32, mx.bfloat16))
    model, tokenizer = load(folder, packed=packed, dtype=dtype)
    if (longest_text(model) or _LONGEST) < _LONGEST:
        return
    pooling = rng.choice((None, "first", "mean"))
    try:
        vectors = embed(model, tokenizer, ["a", "the"], pooling=pooling)
    except ValueError as error:
        # a damaged file may add a token, or a prompt that no text fits beside
        if str(error).startswith("[tokens] "):
            return
        raise
    if vectors.shape != (2, model.dims):
        raise AssertionError(f"vectors of shape {vectors.shape}")


MUTATIONS: tuple[Mutation, ...] = (
    odd_config,
    odd_config,
    odd_layers,
    odd_layers,
    odd_pooling,
    odd_pooling,
    odd_header,
    odd_values,
    odd_tensors,
    damaged_json,
    odd_member,
)

CLASS = FuzzClass(make_sources, partial(damaged_copy, MUTATIONS), load_and_embed)
