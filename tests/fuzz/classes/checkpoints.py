"""Damaged and odd checkpoints in safetensors, with their configuration and vocabulary."""

import json
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mmfree.files import tensors as safetensors_writer
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.models.parts.rotation import Rotation
from tests.fuzz.case import FuzzClass
from tests.fuzz.hostile import ODD_VALUES, damage_bytes, damage_json, replace_file
from tests.fuzz.loading import Mutation, damaged_copy, load_and_run
from tests.hub.checkpoints import (
    GOLDENS,
    split_safetensors,
    tiny_model,
    tiny_transformer,
    write_bitnet_checkpoint,
    write_safetensors,
)

NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    23,
    25,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**63,
    2**64,
    10**30,
    0.5,
    1e300,
)
NAMES = (
    "model.layers.1.attn.i_proj.weight",
    "model.layers.00.attn.i_proj.weight",
    "model.layers.-1.attn_norm.weight",
    "model.layers.99999999999999999999.attn_norm.weight",
    "lm_head.weight_scale",
    "model.layers.0.self_attn.q_proj.weight_scale",
    "model.layers.0.mlp.down_proj.rms_norm.weight",
    "lm_head",
    "head.weight",
    "",
    ".",
    "model..weight",
    "__metadata__",
    "{}",
    "\x00\n\u2028",
)
VOCABULARIES = ("tokenizer.model", "tokenizer.json")
SHARD_NAMES = (
    "../model.safetensors",
    "/dev/zero",
    "/dev/stdin",
    "sub/a.safetensors",
    "a.safetensors",
)


def make_sources(folder: Path) -> None:
    """Sound checkpoints of several kinds, each with a tokenizer."""
    kinds: dict[str, dict[str, Any]] = {
        "float": {},
        "packed": {},
        "tied": {"tie_word_embeddings": True},
        "convolution": {"conv_size": 3, "share_conv_kernel": False},
        "sharded": {},
    }
    limit = safetensors_writer.MAX_SHARD_BYTES
    for kind, options in kinds.items():
        tokenizer = GOLDENS / ("tokenizer_bpe" if kind in ("tied", "sharded") else "tokenizer_spm")
        model = tiny_model(vocab_size=640, hidden_size=16, intermediate_size=24, **options)
        safetensors_writer.MAX_SHARD_BYTES = 20_000 if kind == "sharded" else limit
        save_model(folder / kind, model, tokenizer)
        safetensors_writer.MAX_SHARD_BYTES = limit
        if kind == "packed":
            save_model(folder / kind, load_model(folder / kind), tokenizer, overwrite=True)
    packed = open_checkpoint(folder / "packed")
    convert(packed, folder / "five trits", trits_per_byte=5, check=False)
    _make_transformers(folder)


def _make_transformers(folder: Path) -> None:
    """BitNet with float masters, Llama as transformers packs it, Qwen3 as MLX quantises it."""
    tokenizer = GOLDENS / "tokenizer_bpe"
    scaling = Rotation(1e4, "llama3", 8.0, 1.0, 4.0, 64)
    sizes: dict[str, Any] = {"vocab_size": 640, "hidden_size": 16, "intermediate_size": 24}
    masters = tiny_transformer("bitnet", tie_word_embeddings=True, **sizes)
    save_model(folder / "masters", masters, tokenizer)
    rows = tiny_transformer(rotation=scaling, **sizes)
    write_bitnet_checkpoint(folder / "rows", rows, "bitlinear")
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copyfile(file, folder / "rows" / file.name)
    sizes |= {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
    groups = tiny_transformer("qwen3", linears=None, tie_word_embeddings=True, **sizes)
    nn.quantize(groups, group_size=32, bits=2)
    save_model(folder / "groups", groups, tokenizer)
    for kind in ("maple_hf", "maple_mlx_2bit"):
        shutil.copytree(
            GOLDENS / kind,
            folder / kind,
            ignore=shutil.ignore_patterns("golden.*"),
            copy_function=shutil.copyfile,
        )
        for file in tokenizer.glob("tokenizer*.json"):
            shutil.copyfile(file, folder / kind / file.name)


def _weights(folder: Path, rng: random.Random) -> Path:
    files = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    return rng.choice(sorted(files))


def odd_header(folder: Path, rng: random.Random) -> str:
    """Changes fields of the header, which stays well-formed JSON of the right length."""
    file = _weights(folder, rng)
    header, data = split_safetensors(file)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        name = rng.choice([key for key in header if isinstance(header[key], dict)])
        info = header[name]
        field = rng.choice(("dtype", "shape", "data_offsets", "name", "entry"))
        if field == "dtype":
            value: Any = rng.choice(
                ("F32", "F16", "BF16", "U32", "I8", "BOOL", "F64", "F8_E4M3", 5)
            )
        elif field == "shape":
            value = _odd_list(info.get("shape"), rng)
        elif field == "data_offsets":
            value = _odd_list(info.get("data_offsets"), rng)
        elif field == "name":
            value = rng.choice((*NAMES, *header))
            header[value] = header.pop(name)
        else:
            value = rng.choice(ODD_VALUES)
            header[name] = value
        if field in ("dtype", "shape", "data_offsets"):
            info[field] = value
        done.append(f"{field} of {name!r} = {value!r:.60}")
        if not any(isinstance(entry, dict) for entry in header.values()):
            break
    write_safetensors(file, header, data)
    return "; ".join(done)


def _odd_list(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, list) or not value or rng.random() < 0.2:
        return rng.choice((*ODD_VALUES, [rng.choice(NUMBERS)] * rng.choice((1, 2, 9, 70_000))))
    changed = list(value)
    kind = rng.randrange(4)
    if kind == 0:
        changed[rng.randrange(len(changed))] = rng.choice(NUMBERS)
    elif kind == 1:
        changed.reverse()
    elif kind == 2:
        changed.append(rng.choice(NUMBERS))
    else:
        changed[rng.randrange(len(changed))] += rng.choice((-4, -1, 1, 4))
    return changed


def odd_header_length(folder: Path, rng: random.Random) -> str:
    file = _weights(folder, rng)
    header, data = split_safetensors(file)
    length = rng.choice((0, 1, 7, len(data), 10**8, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)))
    write_safetensors(file, header, data, length=length)
    return str(length)


def damaged_weights(folder: Path, rng: random.Random) -> str:
    file = _weights(folder, rng)
    file.write_bytes(damage_bytes(file.read_bytes(), rng))
    return file.name


def truncated_weights(folder: Path, rng: random.Random) -> str:
    file = _weights(folder, rng)
    size = rng.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} to {size}"


def odd_values(folder: Path, rng: random.Random) -> str:
    """Puts odd numbers into the data of a tensor."""
    file = _weights(folder, rng)
    tensors = mx.load(str(file))
    mx.eval(tensors)
    name = rng.choice(sorted(tensors))
    dtype = tensors[name].dtype
    # NumPy has no bfloat16
    array = np.array(tensors[name].astype(mx.float32 if dtype == mx.bfloat16 else dtype))
    values: tuple[Any, ...]
    if array.dtype == np.uint8:
        values = (0, 0xFF, 0x55, 0xAA, rng.getrandbits(8))
    elif array.dtype == np.uint32:
        values = (0, 0xFFFFFFFF, 0x55555555, 0xAAAAAAAA, rng.getrandbits(32))
    else:
        values = (0.0, float("nan"), float("inf"), -float("inf"), 3e38, -1e-45)
    value = rng.choice(values)
    array.reshape(-1)[rng.randrange(array.size) :: rng.choice((1, 5, array.size))] = value
    mx.save_safetensors(str(file), tensors | {name: mx.array(array).astype(dtype)})
    return f"{name} = {value}"


def odd_tensors(folder: Path, rng: random.Random) -> str:
    """Removes, adds, reshapes or converts tensors; the file itself stays sound."""
    file = _weights(folder, rng)
    tensors = mx.load(str(file))
    mx.eval(tensors)
    name = rng.choice(sorted(tensors))
    kind = rng.choice(("remove", "add", "flatten", "transpose", "double", "astype"))
    array = tensors.pop(name)
    if kind == "add":
        tensors |= {name: array, rng.choice(NAMES) or "x": array}
    elif kind == "flatten":
        tensors[name] = array.reshape(-1)
    elif kind == "transpose":
        tensors[name] = mx.contiguous(array.T)
    elif kind == "double":
        tensors[name] = mx.concatenate([array, array])
    elif kind == "astype":
        tensors[name] = array.astype(rng.choice((mx.float16, mx.bfloat16, mx.int8, mx.uint32)))
    mx.save_safetensors(str(file), tensors)
    return f"{kind} {name}"


def odd_config(folder: Path, rng: random.Random) -> str:
    """Sets some keys of config.json to odd values."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    changed = {}
    for _ in range(rng.choice((1, 1, 1, 2, 6))):
        key = rng.choice(
            (*config, "hidden_ratio", "quantization", "quantization_config", "unknown")
        )
        if rng.random() < 0.2:
            config.pop(key, None)
        else:
            config[key] = rng.choice(NUMBERS if rng.random() < 0.6 else ODD_VALUES)
        changed[key] = config.get(key)
    sections = [
        key
        for key in ("quantization", "quantization_config", "rope_scaling")
        if _is_object(config, key)
    ]
    if sections and rng.random() < 0.5:
        inner = config[rng.choice(sections)]
        key = rng.choice((*inner, "use_rms_norm", "rms_norm_eps", "modules_to_not_convert"))
        inner[key] = rng.choice((*NUMBERS, *ODD_VALUES, "online", "linear", ["lm_head"], []))
        changed[key] = inner[key]
    file.write_text(json.dumps(config))
    return f"{changed!r:.200}"


def _is_object(config: dict[str, Any], key: str) -> bool:
    return isinstance(config.get(key), dict)


def damaged_json(folder: Path, rng: random.Random) -> str:
    """Damages the configuration, the index or the tokenizer's settings."""
    file = rng.choice(sorted(folder.glob("*.json")))
    damage = rng.choice((damage_bytes, damage_json))
    file.write_bytes(damage(file.read_bytes(), rng))
    return f"{damage.__name__} of {file.name}"


def damaged_vocabulary(folder: Path, rng: random.Random) -> str:
    [file] = (folder / name for name in VOCABULARIES if (folder / name).exists())
    file.write_bytes(damage_bytes(file.read_bytes(), rng))
    return file.name


def odd_index(folder: Path, rng: random.Random) -> str:
    """Names odd files in the index, or writes an index beside or instead of a single file."""
    file = folder / "model.safetensors.index.json"
    if not file.exists():
        names = list(mx.load(str(folder / "model.safetensors")))
        file.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = json.loads(file.read_text())
    name = rng.choice(sorted(index["weight_map"]))
    value = rng.choice((*SHARD_NAMES, *ODD_VALUES, *index["weight_map"].values()))
    index["weight_map"][name] = value
    file.write_text(json.dumps(index))
    return f"{name} in {value!r:.60}"


def odd_file(folder: Path, rng: random.Random) -> str:
    """Removes a file, or replaces it by something else."""
    file = rng.choice(sorted(folder.iterdir()))
    kind = rng.choice(("absent", "empty", "folder", "loop", "pipe", "zeros"))
    replace_file(file, kind)
    if kind == "zeros":
        file.write_bytes(bytes(rng.choice((1, 8, 5000))))
    return f"{file.name}: {kind}"


MUTATIONS: tuple[Mutation, ...] = (
    odd_header,
    odd_header,
    odd_header_length,
    damaged_weights,
    truncated_weights,
    odd_values,
    odd_tensors,
    odd_config,
    odd_config,
    damaged_json,
    damaged_vocabulary,
    odd_index,
    odd_file,
)


CLASS = FuzzClass(make_sources, partial(damaged_copy, MUTATIONS), load_and_run)
