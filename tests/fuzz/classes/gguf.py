"""Damaged and odd GGUF files."""

import os
import random
import shutil
import struct
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from mlx_mmfree.files.gguf_blocks import TYPES
from mlx_mmfree.files.gguf_file import read_gguf
from tests.fuzz.case import FuzzClass
from tests.fuzz.hostile import damage_bytes
from tests.fuzz.loading import Mutation, damaged_copy, load_and_run
from tests.hub.checkpoints import GOLDENS, tiny_transformer
from tests.hub.gguf_files import (
    Stored,
    byte_level_metadata,
    metadata_of,
    sentencepiece_metadata,
    tensors_of,
    write_gguf,
)

FILE = "model.gguf"
_SIZES: dict[str, Any] = {"vocab_size": 640, "num_hidden_layers": 1, "initializer_range": 0.1}
_NUMBERS = (0, 1, 2, 3, 7, 12, 36, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 5, 31, 2**31 - 1, 2**32 - 1),
    *(-1, 0.0, -1.5, float("nan"), float("inf"), True, False),
    *("", "llama", "yarn", "linear", "x" * 5000, "\x00", "gpt2", "{{ 1 / 0 }}"),
    *([], [1], [0, 2], ["a"], ["a", "a"], [""], [0.5], [True]),
)
# bytes of a value by the number of its type
_ARRAY_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 8: 8, 10: 8, 11: 8, 12: 8}
_ROTARY = (
    "unknown",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
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


def make_sources(folder: Path) -> None:
    """BitNets in I2_S and TQ1_0, a Llama in TQ2_0 and a Qwen3 with a scale for each block of 128."""
    small = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    kinds: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "bitnet-b1.58": ("I2_S", small | {"model_type": "bitnet"}, byte_level_metadata()),
        "bitnet": ("TQ1_0", wide | {"has_sub_norms": True}, sentencepiece_metadata()),
        "llama": ("TQ2_0", wide, sentencepiece_metadata()),
        "minicpm": ("TQ2_0", wide | {"model_type": "minicpm"}, sentencepiece_metadata()),
    }
    for architecture, (kind, options, vocabulary) in kinds.items():
        model = tiny_transformer(**_SIZES | options | {"tie_word_embeddings": True})
        (folder / architecture).mkdir(parents=True)
        metadata = metadata_of(model, architecture) | vocabulary
        tensors = tensors_of(model, architecture, kind)
        write_gguf(folder / architecture / FILE, metadata, tensors)
    (folder / "maple").mkdir()
    shutil.copyfile(GOLDENS / "gguf_maple_q2_0" / "model.gguf", folder / "maple" / FILE)
    grouped = _SIZES | wide | {"tie_word_embeddings": True, "linears": None}
    model = tiny_transformer("qwen3", **grouped)
    tensors = tensors_of(model, "qwen3", "F32")
    scale = b"\x00\x2c"
    blocks = {
        142: scale + bytes(range(32)),
        41: scale + bytes(range(16)),
        143: bytes(range(26)) + scale,
    }
    kinds_in_turn = cycle(blocks)
    for name, (_, shape, _) in tensors.items():
        if len(shape) == 2:
            number = next(kinds_in_turn)
            tensors[name] = (number, shape, blocks[number] * (shape[0] * shape[1] // 128))
    (folder / "qwen3").mkdir()
    write_gguf(
        folder / "qwen3" / FILE, metadata_of(model, "qwen3") | sentencepiece_metadata(), tensors
    )


def _parts(file: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    metadata, tensors = read_gguf(file)
    content = file.read_bytes()
    numbers = {kind.name: number for number, kind in TYPES.items()}
    return metadata, {
        name: (numbers[tensor.kind.name], tensor.shape, content[tensor.start : tensor.stop])
        for name, tensor in tensors.items()
    }


def damaged_file(folder: Path, rng: random.Random) -> str:
    file = folder / FILE
    content = file.read_bytes()
    # most bytes are data, most checks are on what lies before
    size = rng.choice((len(content), 400, 30_000))
    file.write_bytes(damage_bytes(content[:size], rng) + content[size:])
    return f"the first {size} bytes"


def truncated_file(folder: Path, rng: random.Random) -> str:
    file = folder / FILE
    size = rng.randrange(rng.choice((file.stat().st_size, 400)))
    os.truncate(file, size)
    return f"to {size}"


def odd_number(folder: Path, rng: random.Random) -> str:
    """Writes an odd number over some bytes, often over one of the counts."""
    file = folder / FILE
    content = bytearray(file.read_bytes())
    offset = rng.choice((4, 8, 16, rng.randrange(24, 400), rng.randrange(24, len(content) - 8)))
    value = rng.choice((*_NUMBERS, rng.getrandbits(64)))
    code = rng.choice(("<I", "<Q"))
    struct.pack_into(code, content, offset, value & (2**32 - 1 if code == "<I" else 2**64 - 1))
    file.write_bytes(content)
    return f"{value} at {offset}"


def odd_metadata(folder: Path, rng: random.Random) -> str:
    file = folder / FILE
    metadata, tensors = _parts(file)
    done = []
    for _ in range(rng.choice((1, 1, 1, 3))):
        prefix = f"{metadata.get('general.architecture')}."
        others = ("split.no", "split.count", "prism.hadamard.block_size", "general.alignment")
        key = rng.choice((*metadata, *others, *(prefix + name for name in _ROTARY)))
        if rng.random() < 0.3:
            metadata.pop(key, None)
        else:
            metadata[key] = rng.choice(_VALUES)
        done.append(f"{key} = {metadata.get(key)!r:.40}")
    write_gguf(file, metadata, tensors)
    return "; ".join(done)


def odd_vocabulary(folder: Path, rng: random.Random) -> str:
    """Changes single entries of the vocabulary's lists."""
    file = folder / FILE
    metadata, tensors = _parts(file)
    names = [key for key, value in metadata.items() if isinstance(value, list) and value]
    name = rng.choice(names)
    values = list(metadata[name])
    index = rng.randrange(len(values))
    odd = [value for value in _VALUES if type(value) is type(values[0])]
    kind = rng.choice(("set", "set", "drop", "repeat"))
    if kind == "set":
        values[index] = rng.choice(odd)
    elif kind == "drop":
        del values[index]
    else:
        values[index] = values[index - 1]
    metadata[name] = values
    write_gguf(file, metadata, tensors)
    return f"{kind} {name}[{index}]"


def odd_tensor(folder: Path, rng: random.Random) -> str:
    """Removes, renames, reshapes or fills a tensor, or gives it another type."""
    file = folder / FILE
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


def odd_array(folder: Path, rng: random.Random) -> str:
    """Adds arrays of a type to the metadata, long, nested, or longer than the file."""
    file = folder / FILE
    content = file.read_bytes()
    version, tensors, entries = struct.unpack_from("<IQQ", content, 4)
    kind = rng.choice((*range(14), 99, 2**32 - 1))
    claimed = rng.choice((0, 1, 1000, 3_000_000, 2**31, 2**40, 2**64 - 1))
    stored = min(claimed, rng.choice((1, 1000, 3_000_000)))
    data = bytes(_ARRAY_BYTES.get(kind, 1) * stored)
    head = struct.pack("<IQ", kind, claimed)
    depth = rng.choice((0, 0, 0, 1, 3, 30_000))
    # an array of one array of one array
    head = struct.pack("<IQ", 9, 1) * depth + head
    key = rng.choice((b"odd", b"general.name", b"tokenizer.ggml.tokens", b"llama.vocab_size"))
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + head + data
    counts = struct.pack("<IQQ", version, tensors, entries + 1)
    file.write_bytes(content[:4] + counts + entry + content[24:])
    return f"{claimed} of type {kind}, {stored} there, {depth} deep"


MUTATIONS: tuple[Mutation, ...] = (
    damaged_file,
    truncated_file,
    odd_number,
    odd_number,
    odd_metadata,
    odd_vocabulary,
    odd_tensor,
    odd_tensor,
    odd_array,
)
CLASS = FuzzClass(
    make_sources,
    partial(damaged_copy, MUTATIONS),
    load_and_run,
    stays_until_exit="mlx_mmfree-.*",
)
