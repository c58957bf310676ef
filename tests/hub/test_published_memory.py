"""Ternary Bonsai 27B and Maple in their published widths, from files that take no space on the disk."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import demo
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.evaluation.benchmark import measure
from mlx_mmfree.files.tensors import TensorSpec, file_head
from mlx_mmfree.generation import memory_need, prefill
from mlx_mmfree.hub import load_model, needed_bytes, open_checkpoint
from mlx_mmfree.hub.checkpoint.formats import affine
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models.maple import FULL, SLIDING
from mlx_mmfree.models.parts.architecture import weight_names
from mlx_mmfree.ops.ternary import packed_width
from mlx_mmfree.platform.resident_memory import peak_resident_bytes

GB, LENGTH = 10**9, 16
_BFLOAT16_ONE = b"\x80\x3f"
_HEAD = affine.format(64, 4)
MAPLE: dict[str, Any] = {
    "model_type": "maple",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "layer_types": [*[SLIDING] * 3, FULL] * 6,
    "sliding_window": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    # not known, and taken from Qwen3: these two matrices are a fifteenth of the file
    "vocab_size": 151936,
}
_IN_CODES = affine.format(128, 2) | {"lm_head": _HEAD, "model.word_embeddings": _HEAD}


def bonsai_specs(config: dict[str, Any]) -> list[TensorSpec]:
    """The tensors of a checkpoint as mlx-lm lays it out."""
    model = skeleton(config)
    names = weight_names(model.config)
    specs = []
    for name, array in parameters(model).items():
        shape = (*array.shape[::2], 1) if name.endswith("qkv_conv.weight") else array.shape
        specs.append(TensorSpec(names.to_disk(name), array.dtype, shape))
    return specs


def maple_specs(config: dict[str, Any]) -> list[TensorSpec]:
    """Codes of 2 bits with a scale for each row, of all experts in one; embedding and head of 4 bits."""
    model, specs = skeleton(config), []
    names = weight_names(model.config)
    for name, array in parameters(model).items():
        disk, (rows, *inputs) = names.to_disk(name), array.shape
        module = disk.removesuffix(".weight")
        if module in _IN_CODES:
            specs += affine.specs(module, rows, *inputs, 64, 4, array.dtype)
        elif module.endswith("_proj"):
            count = config["num_experts"]
            lead = (count, rows // count) if "switch_mlp" in module else (rows,)
            specs.append(TensorSpec(disk, mx.uint32, (*lead, packed_width(*inputs))))
            specs.append(TensorSpec(f"{module}.row_alpha", array.dtype, lead))
        else:
            specs.append(TensorSpec(disk, array.dtype, array.shape))
    return specs


def write_zeros(folder: Path, config: dict[str, Any], specs: Sequence[TensorSpec]) -> int:
    """Writes a checkpoint whose weights are a hole in its file, but scales of rows are 1.

    Returns:
        The bytes of the file.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    file.write_bytes(file_head(specs))
    offset = file.stat().st_size
    os.truncate(file, offset + sum(spec.nbytes for spec in specs))
    with file.open("r+b") as stream:
        for spec in specs:
            if spec.name.endswith("row_alpha"):
                stream.seek(offset)
                stream.write(_BFLOAT16_ONE * (spec.nbytes // 2))
            offset += spec.nbytes
    return offset


def load_and_read(folder: str, length: int) -> dict[str, int]:
    """In a process of its own: the bytes that loading takes, and the most that reading a chunk holds."""
    # what Python and MLX take once is no memory of this model
    prefill(load_model(demo.path()), mx.zeros((1, length), mx.int32))
    before = peak_resident_bytes()
    model = load_model(folder)
    loaded = peak_resident_bytes()
    mx.reset_peak_memory()
    prefill(model, mx.zeros((1, length), mx.int32), step_size=length)
    return {"loading": loaded - before, "reading": mx.get_peak_memory()}


def write_bonsai(folder: Path) -> dict[str, Any]:
    """A linear layer, a full one and the whole vocabulary: every kind, and the largest tensors."""
    kinds = ["linear_attention", "full_attention"]
    config = {**presets()["ternary-bonsai-27b"], "num_hidden_layers": 2, "layer_types": kinds}
    write_zeros(folder, config, bonsai_specs(config))
    return config


def write_maple(folder: Path) -> dict[str, Any]:
    """A layer with a window, one without, and all experts of both."""
    config = {**MAPLE, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    write_zeros(folder, config | {"quantization": _IN_CODES}, maple_specs(config))
    return config


@pytest.mark.slow
@pytest.mark.parametrize(("write", "capacity"), [(write_bonsai, 0.7 * GB), (write_maple, 0.5 * GB)])
def test_layers_of_the_published_width_take_what_is_planned(
    write: Any, capacity: float, tmp_path: Path
) -> None:
    """With so much memory all 7.57 GB of Bonsai load within 8.3 GB, and 5.37 GB of Maple in 5.87 GB."""
    config = write(tmp_path / "m")
    function = f"{__name__}:load_and_read"
    found = measure(function, {"folder": str(tmp_path / "m"), "length": LENGTH})
    weights = needed_bytes(open_checkpoint(tmp_path / "m"))
    assert weights <= found["loading"] <= weights + capacity
    need = memory_need(skeleton(config), weights, prefill_step_size=LENGTH, context_length=LENGTH)
    assert found["reading"] == pytest.approx(need.total_bytes, rel=0.1)


@pytest.mark.slow
def test_all_of_maple_is_planned_to_take_its_file_and_a_tenth(tmp_path: Path) -> None:
    size = write_zeros(tmp_path / "m", MAPLE | {"quantization": _IN_CODES}, maple_specs(MAPLE))
    assert 5e9 < size < 6e9
    assert 0.99 * size <= needed_bytes(open_checkpoint(tmp_path / "m")) <= 1.1 * size
