"""Saved prompts: odd tensors, metadata and headers."""

import json
import random
import shutil
from pathlib import Path

import mlx.core as mx

from mlx_mmfree import generate
from mlx_mmfree.generation.prompt_cache import (
    cache_prompt,
    load_prompt_cache,
    read_settings,
    save_prompt_cache,
)
from tests.fuzz.base_model import BASES, base_of, link_base, make_base
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.checkpoints import (
    damaged_weights,
    odd_file,
    odd_header,
    odd_header_length,
    truncated_weights,
)
from tests.fuzz.hostile import ODD_VALUES, RAW_JSON

_FILE = "prompt.safetensors"


def make_sources(folder: Path) -> None:
    """A saved prompt of each model."""
    for base in BASES:
        make_base(folder / base, base)
        (folder / f"{base}-cache").mkdir()
        link_base(folder / f"{base}-cache", folder / base)
        model, tokenizer = base_of(folder / f"{base}-cache")
        cache = cache_prompt(model, tokenizer.encode("Once upon a time"))
        save_prompt_cache(folder / f"{base}-cache" / _FILE, model, cache, {"kv_bits": None})


def odd_metadata(folder: Path, rng: random.Random) -> str:
    """Odd settings, versions and fingerprints."""
    tensors, metadata = _parts(folder)
    key = rng.choice((*metadata, "mmfree_key_values", "mmfree_key_values", "odd"))
    settings = {
        rng.choice(("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start", "odd")): value
        for value in rng.sample(ODD_VALUES, 2)
    }
    value = rng.choice((json.dumps(settings), rng.choice(RAW_JSON), "", "0", "\x1b[2J"))
    metadata[key] = value
    mx.save_safetensors(str(folder / _FILE), tensors, metadata)
    return f"{key} = {value!r:.100}"


def odd_state(folder: Path, rng: random.Random) -> str:
    """Odd values, shapes and names; the model's fingerprint stays right."""
    tensors, metadata = _parts(folder)
    name = rng.choice(sorted(tensors))
    array = tensors.pop(name)
    kind = rng.choice(("remove", "values", "values", "values", "shape", "longer", "type", "rename"))
    if kind == "values":
        is_whole = not mx.issubdtype(array.dtype, mx.floating)
        odd = (
            (0, 1, -1, 517, 518, 2**31 - 1, -(2**31)) if is_whole else (mx.nan, mx.inf, 3e38, -3e38)
        )
        flat = mx.array(array.reshape(-1))
        flat[rng.randrange(flat.size) :: rng.choice((1, 3, flat.size))] = rng.choice(odd)
        tensors[name] = flat.reshape(array.shape)
    elif kind == "shape":
        tensors[name] = rng.choice((array[None], array.reshape(-1), mx.contiguous(array.T)))
    elif kind == "longer":
        tensors[name] = mx.concatenate([array] * rng.choice((2, 300)), rng.randrange(array.ndim))
    elif kind == "type":
        tensors[name] = array.astype(rng.choice((mx.float16, mx.bfloat16, mx.int8, mx.float32)))
    elif kind == "rename":
        tensors[rng.choice(("state.9.9", "state.", "tokens.0", "odd", *tensors))] = array
    mx.save_safetensors(str(folder / _FILE), tensors, metadata)
    return f"{kind} {name}"


def _parts(folder: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    tensors, metadata = mx.load(str(folder / _FILE), return_metadata=True)
    mx.eval(tensors)
    return tensors, metadata


_MUTATIONS = (
    *(odd_metadata, odd_state, odd_state, odd_header, odd_header_length, damaged_weights),
    *(truncated_weights, odd_file),
)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Damages a copy of a saved prompt; some come from another model."""
    base = rng.choice(BASES)
    other = rng.choice(BASES) if rng.random() < 0.05 else base
    (target / "cache").mkdir(parents=True)
    shutil.copyfile(sources / f"{other}-cache" / _FILE, target / "cache" / _FILE)
    link_base(target, sources / base)
    mutation = rng.choice(_MUTATIONS)
    return f"{mutation.__name__} in {other}'s for {base}: {mutation(target / 'cache', rng)}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Goes on from the saved prompt; generation itself refuses logits that are not finite."""
    model, tokenizer = base_of(folder)
    file = folder / "cache" / _FILE
    read_settings(file)
    cache = load_prompt_cache(file, model)
    generate(model, tokenizer, "a b", state=cache.state, max_tokens=2)


CLASS = FuzzClass(make_sources, mutate, exercise)
