"""Ternary Bonsai 27B in its published width, from files of zeros that take no room on the disk."""

import json
import os
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
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models.parts.architecture import weight_names
from mlx_mmfree.platform.resident_memory import peak_resident_bytes

GB, LENGTH = 10**9, 16
ROOM = 0.7 * GB
"""What loading may take beside the weights: all 7.57 GB then load within 8.3 GB."""


def write_zeros(folder: Path, config: dict[str, Any]) -> None:
    """Writes a checkpoint as mlx-lm lays it out, whose weights are a hole in its file."""
    model = skeleton(config)
    names = weight_names(model.config)
    specs = []
    for name, array in parameters(model).items():
        shape = (*array.shape[::2], 1) if name.endswith("qkv_conv.weight") else array.shape
        specs.append(TensorSpec(names.to_disk(name), array.dtype, shape))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    file.write_bytes(file_head(specs))
    os.truncate(file, file.stat().st_size + sum(spec.nbytes for spec in specs))


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


@pytest.mark.slow
def test_layers_of_the_published_width_take_what_is_planned(tmp_path: Path) -> None:
    """A linear layer, a full one and the whole vocabulary: every kind, and the largest tensors."""
    kinds = ["linear_attention", "full_attention"]
    config = {**presets()["ternary-bonsai-27b"], "num_hidden_layers": 2, "layer_types": kinds}
    write_zeros(tmp_path / "m", config)
    place = f"{__name__}:load_and_read"
    found = measure(place, {"folder": str(tmp_path / "m"), "length": LENGTH})
    weights = needed_bytes(open_checkpoint(tmp_path / "m"))
    assert weights <= found["loading"] <= weights + ROOM
    need = memory_need(skeleton(config), weights, prefill_step_size=LENGTH, context_length=LENGTH)
    assert found["reading"] == pytest.approx(need.total_bytes, rel=0.1)
