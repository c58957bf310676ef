"""Makes small checkpoints, and writes safetensors files byte by byte."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mmfree.hub import save_model
from mlx_mmfree.models import Decoder, find

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


def tiny_model(**options: Any) -> Decoder:
    """A random model in its training form."""
    architecture = find("hgrn_bit")
    mx.random.seed(3)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "initializer_range": 0.3,
    }
    return architecture.build(architecture.Config(**sizes | options))


def tiny_checkpoint(folder: Path, **options: Any) -> Path:
    """A folder with a small float checkpoint without a tokenizer."""
    save_model(folder, tiny_model(**options))
    return folder


def golden_checkpoint(name: str, folder: Path) -> Path:
    """A copy of a golden case."""
    shutil.copytree(GOLDENS / name, folder, copy_function=shutil.copyfile)
    return folder


def write_safetensors(
    file: Path, header: Any, data: bytes = b"", length: int | None = None
) -> None:
    """Writes a file with any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(text) if length is None else length)
    file.write_bytes(prefix + text + data)


def split_safetensors(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def edit_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; `...` removes one."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: v for key, v in value.items() if v is not ...}))


def edit_tensors(file: Path, **changes: mx.array | None) -> None:
    """Replaces or adds tensors of a safetensors file; `None` removes one. `__` stands for a dot."""
    tensors = dict(mx.load(str(file)))
    mx.eval(tensors)
    for name, array in changes.items():
        tensors[name.replace("__", ".")] = array
    kept = {name: array for name, array in tensors.items() if array is not None}
    mx.save_safetensors(str(file), kept)
