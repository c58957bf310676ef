"""Masters that are made up from trits: the same trits, scales and results."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import load_model, needed_bytes, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.load import master_weight
from mlx_mmfree.layers import BitLinear, PackedBitLinear, pack_linears
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from tests.tolerances import TOLERANCE, relative_error

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 45,
    "initializer_range": 0.3,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "hgrn": {"model_type": "hgrn_bit"},
    "hgrn_tied": {"model_type": "hgrn_bit", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **HEADS, "quantization_config": TernaryLinears().to_hub()},
    "bitnet": {"model_type": "bitnet", "rope_theta": 500000.0, **HEADS, "attention_bias": False},
}


def _build(name: str) -> Decoder:
    mx.random.seed(4)
    architecture = find(MODELS[name]["model_type"])
    model: Decoder = architecture.build(architecture.config.from_hub(SIZES | MODELS[name]))
    for module in model.modules():
        if isinstance(module, BitLinear) and "bias" in module:
            module.bias = mx.random.normal(module.bias.shape)
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_gets_masters_that_pack_to_the_same(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "packed", pack_linears(_build(name)))
    with pytest.raises(CheckpointError, match="packed from, or pass rebuild_masters=True"):
        load_model(tmp_path / "packed", packed=False)
    model = load_model(tmp_path / "packed", packed=False, rebuild_masters=True)
    assert not any(isinstance(module, PackedBitLinear) for module in model.modules())
    want = parameters(_build(name))
    assert {k: v.shape for k, v in parameters(model).items()} == {
        k: v.shape for k, v in want.items()
    }
    save_model(tmp_path / "masters", model)
    again, before = (parameters(load_model(tmp_path / kind)) for kind in ("masters", "packed"))
    for path, array in before.items():
        if path.endswith(".scale"):
            assert relative_error(again[path], array) <= TOLERANCE[mx.float32], path
        else:
            assert mx.array_equal(again[path], array), path


def test_masters_that_are_there_are_taken(tmp_path: Path) -> None:
    model = _build("hgrn")
    save_model(tmp_path, model)
    loaded = load_model(tmp_path, packed=False, rebuild_masters=True)
    for path, array in parameters(model).items():
        assert mx.array_equal(parameters(loaded)[path], array), path


def test_memory_is_that_of_the_floats(tmp_path: Path) -> None:
    save_model(tmp_path, pack_linears(_build("bitnet")))
    model = load_model(tmp_path, packed=False, rebuild_masters=True)
    need = needed_bytes(open_checkpoint(tmp_path), packed=False, rebuild_masters=True)
    assert need == pytest.approx(sum(a.nbytes for a in parameters(model).values()), rel=0.01)


def test_a_matrix_of_zeros_stays_one() -> None:
    packed = PackedBitLinear(32, 3)
    assert mx.array_equal(master_weight(packed), mx.zeros((3, 32)))


def test_a_tied_head_needs_the_embedding_in_floats(tmp_path: Path) -> None:
    model = pack_linears(_build("hgrn_tied"))
    nn.quantize(model, 32, 8, class_predicate=lambda path, module: path == "embed")
    save_model(tmp_path, model)
    with pytest.raises(CheckpointError, match="head that shares an embedding in few bits"):
        load_model(tmp_path, packed=False, rebuild_masters=True)
