"""Makes small checkpoints, and writes safetensors files byte by byte."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers import BitLinear, PackedBitLinear
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.ops import ternarize

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
TOKENS = mx.array([[1, 7, 3, 39, 0]])


def logits(model: Decoder) -> mx.array:
    """The logits of a model for `TOKENS`."""
    return model(TOKENS)[0]


def nbytes(model: Decoder) -> int:
    """Bytes of the weights of a model."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def refused(folder: Path, message: str, **arguments: Any) -> None:
    """Asserts that a folder is not loaded, and that one line says why."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(folder, **arguments)
    assert "\n" not in str(caught.value)


def tiny_model(**options: Any) -> Decoder:
    """A random model in its training variant."""
    architecture = find("hgrn_bit")
    mx.random.seed(3)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "initializer_range": 0.3,
    }
    return architecture.build(architecture.config(**sizes | options))


def tiny_of(kind: str, seed: int = 3, **options: Any) -> Decoder:
    """A random model of the sizes with which an architecture is tried."""
    architecture = find(kind)
    mx.random.seed(seed)
    sizes = {**architecture.tiny, "initializer_range": 0.3}
    model: Decoder = architecture.build(architecture.config.from_hub({**sizes, **options}))
    return model


def tiny_checkpoint(folder: Path, **options: Any) -> Path:
    """A folder with a small float checkpoint without a tokenizer."""
    save_model(folder, tiny_model(**options))
    return folder


def tiny_transformer(model_type: str = "llama", **options: Any) -> Decoder:
    """A random BitNet-style transformer in its training variant."""
    architecture = find(model_type)
    mx.random.seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 44,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "linears": TernaryLinears(),
        "initializer_range": 0.3,
    }
    return architecture.build(architecture.config(**sizes | options))


def weight_only(folder: Path) -> Decoder:
    """The model of a folder with float activations, as mlx-lm computes it."""
    model = load_model(folder)
    for module in model.modules():
        if isinstance(module, PackedBitLinear):
            module._quantize_activations = False
    return model


def write_bitnet_checkpoint(folder: Path, model: Decoder, linear_class: str | None) -> Path:
    """Writes a model with ternary linears as transformers packs them, from the definition.

    Args:
        folder: The folder to make.
        model: A model in its training variant.
        linear_class: The key of `quantization_config`, which says what a scale means; `None`
            leaves it out.
    """
    save_model(folder, model)
    file = folder / "model.safetensors"
    tensors = dict(mx.load(str(file)))
    names = WeightNames(find(model.config.model_type).weight_names)
    for path, module in model.named_modules():
        if isinstance(module, BitLinear):
            name = names.to_disk(f"{path}.weight")
            trits, scale = ternarize(tensors[name])
            codes = np.array(trits).astype(np.uint8) + np.uint8(1)
            quarter = -(-len(codes) // 4)
            packed = np.zeros((quarter, codes.shape[1]), np.uint8)
            for row, values in enumerate(codes):
                packed[row % quarter] |= values << np.uint8(2 * (row // quarter))
            is_multiplied = linear_class == "autobitlinear"
            tensors[name] = mx.array(packed)
            tensors[f"{name}_scale"] = scale if is_multiplied else 1.0 / scale
    mx.save_safetensors(str(file), tensors)
    config = json.loads((folder / "config.json").read_text())
    described = config["quantization_config"] | {"quantization_mode": "offline"}
    described["linear_class"] = linear_class
    if linear_class is None:
        del described["linear_class"], described["quantization_mode"]
    edit_json(folder / "config.json", quantization_config=described)
    return folder


def golden_checkpoint(name: str, folder: Path) -> Path:
    """A copy of a golden case."""
    shutil.copytree(GOLDENS / name, folder, copy_function=shutil.copyfile)
    return folder


def random_checkpoint(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Writes a checkpoint with matrices around 0 and norms around 1, in bfloat16; gives its numbers."""
    folder.mkdir()
    tensors = {}
    for name, shape in shapes.items():
        random = np.random.default_rng([*name.encode()])
        values = random.standard_normal(shape, dtype=np.float32)
        values = values * 0.1 + 1 if len(shape) == 1 else values * 0.02
        tensors[name] = mx.array(values, mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {name: np.array(array.astype(mx.float32)) for name, array in tensors.items()}


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
    left = {name: array for name, array in tensors.items() if array is not None}
    mx.save_safetensors(str(file), left)
