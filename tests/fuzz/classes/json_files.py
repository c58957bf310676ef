"""JSON beside the weights with numbers, depths and texts that Python would not write."""

import json
import random
import shutil
from pathlib import Path

from tests.fuzz.base_model import BASES, make_base
from tests.fuzz.case import FuzzClass
from tests.fuzz.hostile import RAW_JSON, with_raw_json
from tests.fuzz.loading import load_and_run

_NAMES = (
    *("config.json", "config.json", "generation_config.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json"),
)


def make_sources(folder: Path) -> None:
    """Models, with all the files of settings that there are."""
    for base in BASES:
        make_base(folder / base, base)
        contents = {
            "generation_config.json": {"eos_token_id": [513, 517], "bos_token_id": 512},
            "special_tokens_map.json": {"eos_token": {"content": "<|eot_id|>", "lstrip": False}},
            "added_tokens.json": {"<|eot_id|>": 517},
        }
        for name, content in contents.items():
            (folder / base / name).write_text(json.dumps(content))


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Puts raw text into one of the files, or in place of it."""
    source = rng.choice(sorted(sources.iterdir()))
    shutil.copytree(source, target)
    name = rng.choice(_NAMES)
    file = target / name
    if name == "model.safetensors.index.json":
        file.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model.safetensors"}}))
        (target / "model.safetensors").rename(target / "model-00001-of-00001.safetensors")
    if rng.random() < 0.1:
        file.write_text(rng.choice(RAW_JSON))
        return f"{name} = {file.read_text()[:100]}"
    text = with_raw_json(json.loads(file.read_text()), rng)
    file.write_text(text, encoding=rng.choice(("utf-8", "utf-8", "utf-8", "utf-16")))
    return f"{name}: {text[:300]}"


CLASS = FuzzClass(make_sources, mutate, load_and_run)
