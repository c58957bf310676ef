"""Damaged and odd descriptions of rotated weights: lists of modules, signs, and metadata of GGUF."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mmfree.hub import load_model
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.checkpoints import NUMBERS, damaged_json, odd_header
from tests.fuzz.hostile import ODD_VALUES, damage_bytes
from tests.fuzz.loading import Mutation, damaged_copy

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
SOURCES = ("prism_schema1", "gguf_qwen35_pq2_0_rotated", "mlx_qwen35_2bit_g128")
_FILE, _HEADER = "model.gguf", 12_000
_KEYS = ("path", "embedding", "block", "dtype")
_OTHERS = (
    *("schema_version", "tensor_namespace", "gdn_activation_layout", "quantization", "modules"),
    *("model_type", "base_model_type", "layer_types", "rope_parameters", "text_config"),
)


def make_sources(folder: Path) -> None:
    for name in SOURCES:
        shutil.copytree(GOLDENS / name, folder / name)
        (folder / name / "golden.safetensors").unlink()


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def odd_module(folder: Path, rng: random.Random) -> str:
    """Sets a value of a module, repeats a module, or leaves one out."""
    config = _config(folder)
    modules = config.get("modules")
    if not modules:
        return odd_metadata(folder, rng)
    number, kind = rng.randrange(len(modules)), rng.randrange(4)
    if kind == 0:
        del modules[number]
    elif kind == 1:
        modules.append(modules[number])
    else:
        odd = (*NUMBERS, *ODD_VALUES, True, 64, 256, 512, 1024, "lm_head", "model.norm")
        modules[number][rng.choice(_KEYS)] = rng.choice(odd)
    _write(folder, config)
    return f"module {number}, way {kind}"


def odd_key(folder: Path, rng: random.Random) -> str:
    """Sets or removes a key that describes the rotation or the model."""
    config = _config(folder)
    if not config:
        return odd_metadata(folder, rng)
    key, value = rng.choice(_OTHERS), rng.choice((*NUMBERS, *ODD_VALUES, "qwen3_5", {"bits": 2}))
    config[key] = value
    if rng.random() < 0.3:
        del config[key]
    _write(folder, config)
    return f"{key} = {value!r:.100}"


def odd_signs(folder: Path, rng: random.Random) -> str:
    """Changes, shortens, renames or adds signs."""
    file = folder / "model.safetensors"
    if not file.exists():
        return odd_metadata(folder, rng)
    tensors: dict[str, mx.array] = mx.load(str(file))
    names = [name for name in tensors if name.endswith(".signs")]
    name = rng.choice(names) if names else "language_model.lm_head.signs"
    kind = rng.randrange(5)
    if kind == 0 or name not in tensors:
        tensors[name] = mx.ones((rng.choice((1, 64, 128, 512)),))
    elif kind == 1:
        tensors[rng.choice(sorted(tensors)) + ".signs"] = tensors.pop(name)
    elif kind == 2:
        tensors[name] = tensors[name].astype(rng.choice((mx.float16, mx.int8, mx.uint32)))
    elif kind == 3:
        tensors[name] = tensors[name] * rng.choice((0.0, 2.0, float("nan"), float("inf")))
    else:
        tensors[name] = tensors[name].reshape(2, -1)
    mx.save_safetensors(str(file), tensors)
    return f"{name}, way {kind}"


def odd_metadata(folder: Path, rng: random.Random) -> str:
    """Damages bytes, in GGUF of the header alone."""
    file = folder / _FILE
    if not file.exists():
        return damaged_json(folder, rng)
    data = file.read_bytes()
    file.write_bytes(damage_bytes(data[:_HEADER], rng) + data[_HEADER:])
    return "the header"


def odd_tensor(folder: Path, rng: random.Random) -> str:
    """Says something else of a tensor."""
    has_header = (folder / "model.safetensors").exists()
    return odd_header(folder, rng) if has_header else odd_metadata(folder, rng)


def load_and_run(folder: Path, rng: random.Random) -> None:
    """Loads a model and computes logits."""
    file = folder / _FILE
    dtype = rng.choice((None, mx.float32))
    model = load_model(file if file.exists() else folder, dtype=dtype)
    logits, _ = model(mx.array([[0, model.vocab_size - 1]]))
    mx.eval(logits)
    if logits.shape != (1, 2, model.vocab_size):
        raise AssertionError(f"logits of shape {logits.shape}")


MUTATIONS: tuple[Mutation, ...] = (
    odd_module,
    odd_module,
    odd_key,
    odd_key,
    odd_signs,
    odd_signs,
    odd_metadata,
    odd_tensor,
)

CLASS = FuzzClass(
    make_sources,
    partial(damaged_copy, MUTATIONS),
    load_and_run,
    stays_until_exit="mlx_mmfree-.*",
)
