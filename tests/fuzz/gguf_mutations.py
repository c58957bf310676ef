"""Damaged copies of small GGUF files, reproducible from a seed."""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_mmfree.hub.gguf import read_gguf
from mlx_mmfree.hub.gguf_types import TYPES
from tests.hub.checkpoints import tiny_transformer
from tests.hub.gguf_files import (
    Stored,
    byte_level_metadata,
    metadata_of,
    sentencepiece_metadata,
    tensors_of,
    write_gguf,
)
from tests.hub.mutations import damage_bytes

_SIZES: dict[str, Any] = {"vocab_size": 640, "num_hidden_layers": 1, "initializer_range": 0.1}
_NUMBERS = (0, 1, 2, 3, 7, 12, 36, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 5, 31, 2**31 - 1, 2**32 - 1),
    *(-1, 0.0, -1.5, float("nan"), float("inf"), True, False),
    *("", "llama", "x" * 5000, "\x00", "gpt2", "{{ 1 / 0 }}"),
    *([], [1], [0, 2], ["a"], ["a", "a"], [""], [0.5], [True]),
)
_NAMES = (
    "blk.0.attn_q.weight",
    "blk.00.attn_q.weight",
    "blk.999999.attn_norm.weight",
    "blk.0.attn_q.bias",
    "blk.0.attn_q.scale",
    "output.weight",
    "rope_freqs.weight",
    ".weight",
    "weight",
)


def make_gguf_sources(folder: Path) -> list[Path]:
    """BitNets in I2_S and TQ1_0 and a Llama in TQ2_0, each in a folder with its vocabulary."""
    small = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    kinds: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "bitnet-b1.58": ("I2_S", small | {"model_type": "bitnet"}, byte_level_metadata()),
        "bitnet": ("TQ1_0", wide | {"has_sub_norms": True}, sentencepiece_metadata()),
        "llama": ("TQ2_0", wide, sentencepiece_metadata()),
    }
    for architecture, (kind, options, vocabulary) in kinds.items():
        model = tiny_transformer(**_SIZES | options | {"tie_word_embeddings": True})
        (folder / architecture).mkdir(parents=True)
        metadata = metadata_of(model, architecture) | vocabulary
        tensors = tensors_of(model, architecture, kind)
        write_gguf(folder / architecture / "model.gguf", metadata, tensors)
    return [folder / architecture for architecture in kinds]


def _parts(file: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    metadata, tensors = read_gguf(file)
    content = file.read_bytes()
    numbers = {kind.name: number for number, kind in TYPES.items()}
    return metadata, {
        name: (numbers[tensor.kind.name], tensor.shape, content[tensor.start : tensor.stop])
        for name, tensor in tensors.items()
    }


def damaged_file(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    # most bytes are data, most checks are on what lies before
    size = rng.choice((len(content), 400, 30_000))
    file.write_bytes(damage_bytes(content[:size], rng) + content[size:])
    return f"the first {size} bytes"


def truncated_file(file: Path, rng: random.Random) -> str:
    size = rng.randrange(rng.choice((file.stat().st_size, 400)))
    os.truncate(file, size)
    return f"to {size}"


def odd_number(file: Path, rng: random.Random) -> str:
    """Writes an odd number over some bytes, often over one of the counts."""
    content = bytearray(file.read_bytes())
    place = rng.choice((4, 8, 16, rng.randrange(24, 400), rng.randrange(24, len(content) - 8)))
    value = rng.choice((*_NUMBERS, rng.getrandbits(64)))
    code = rng.choice(("<I", "<Q"))
    struct.pack_into(code, content, place, value & (2**32 - 1 if code == "<I" else 2**64 - 1))
    file.write_bytes(content)
    return f"{value} at {place}"


def odd_metadata(file: Path, rng: random.Random) -> str:
    metadata, tensors = _parts(file)
    done = []
    for _ in range(rng.choice((1, 1, 1, 3))):
        prefix = f"{metadata.get('general.architecture')}."
        key = rng.choice(
            (*metadata, f"{prefix}rope.scaling.type", f"{prefix}unknown", "general.alignment")
        )
        if rng.random() < 0.3:
            metadata.pop(key, None)
        else:
            metadata[key] = rng.choice(_VALUES)
        done.append(f"{key} = {metadata.get(key)!r:.40}")
    write_gguf(file, metadata, tensors)
    return "; ".join(done)


def odd_vocabulary(file: Path, rng: random.Random) -> str:
    """Changes single entries of the vocabulary's lists."""
    metadata, tensors = _parts(file)
    names = [key for key, value in metadata.items() if isinstance(value, list) and value]
    name = rng.choice(names)
    values = list(metadata[name])
    place = rng.randrange(len(values))
    odd = [value for value in _VALUES if type(value) is type(values[0])]
    kind = rng.choice(("set", "set", "drop", "repeat"))
    if kind == "set":
        values[place] = rng.choice(odd)
    elif kind == "drop":
        del values[place]
    else:
        values[place] = values[place - 1]
    metadata[name] = values
    write_gguf(file, metadata, tensors)
    return f"{kind} {name}[{place}]"


def odd_tensor(file: Path, rng: random.Random) -> str:
    """Removes, renames, reshapes or fills a tensor, or gives it another type."""
    metadata, tensors = _parts(file)
    name = rng.choice(sorted(tensors))
    kind, shape, content = tensors.pop(name)
    change = rng.choice(("remove", "rename", "reshape", "fill", "type"))
    if change == "rename":
        name = rng.choice((*_NAMES, *tensors))
    elif change == "reshape":
        shape = rng.choice(
            (shape[::-1], (*shape, 1), (1, *shape), shape[:1], (rng.choice(_NUMBERS), shape[-1]))
        )
        shape = tuple(size % 2**64 for size in shape)
    elif change == "fill":
        byte = rng.choice((0, 1, 0x55, 0x7C, 0x7F, 0xAA, 0xFF))
        start = rng.choice((0, max(0, len(content) - 32)))
        content = content[:start] + bytes([byte]) * (len(content) - start)
    elif change == "type":
        kind = rng.choice((*TYPES, 12, 99, 2**32 - 1))
    if change != "remove":
        tensors[name] = kind, shape, content
    write_gguf(file, metadata, tensors)
    return f"{change} {name}"


GGUF_MUTATIONS: tuple[Callable[[Path, random.Random], str], ...] = (
    damaged_file,
    truncated_file,
    odd_number,
    odd_number,
    odd_metadata,
    odd_vocabulary,
    odd_tensor,
    odd_tensor,
)
