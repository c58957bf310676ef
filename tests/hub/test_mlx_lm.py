"""Checkpoints that mlx-lm writes: conversions of published families, and its own quantisation."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers import PackedBitLinear, PackedLinear, QuantizedLinear
from mlx_mmfree.models import Decoder
from mlx_mmfree.ops import pack_ternary
from tests.hub.checkpoints import TOKENS, edit_json, logits, tiny_transformer
from tests.hub.published import write_published
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
# mlx-lm itself cannot read Llama3-8B-1.58: it takes the dense head for a packed one
PACKED = ["bitnet-b1.58-2B-4T", "Falcon3-1.58bit", "Falcon-E"]


def convert(
    source: Path, target: Path, bits: int | None = None, predicate: Any = None
) -> nn.Module:
    """Does what `mlx_lm.convert` does with a folder, without its tokenizer; returns its model."""
    from mlx_lm import utils

    model, config = utils.load_model(source, lazy=True)
    if bits is not None:
        model, config = utils.quantize_model(
            model, config, group_size=32, bits=bits, quant_predicate=predicate
        )
    target.mkdir()
    utils.save_model(target, model, donate_model=False)
    utils.save_config(config, target / "config.json")
    return model


def ternary_model(model_type: str) -> Decoder:
    """A dense model whose linears and embedding are ternary, each row with its own scale."""
    model = tiny_transformer(model_type, linears=None, **SIZES)
    for _, module in model.named_modules():
        if "weight" in module and module.weight.ndim == 2:
            trits = mx.clip(mx.round(module.weight * 3), -1, 1)
            module.weight = trits * (1 + mx.arange(len(trits)) % 4)[:, None] * 0.0625
    return model


def as_affine(model: Decoder) -> Decoder:
    """The same weights as `code * scale - scale` with codes 0 to 2; `mx.quantize` would round."""
    replaced = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            scale = mx.max(mx.abs(module.weight), axis=1)
            made = nn.QuantizedLinear(columns, rows, False, 32, 2)
            made.weight = pack_ternary(mx.sign(module.weight))
            made.scales = mx.repeat(scale[:, None], columns // 32, axis=1)
            made.biases = -made.scales
            replaced.append((path, made))
    model.update_modules(tree_unflatten(replaced))
    return model


@pytest.mark.parametrize("name", PACKED)
def test_conversions_of_packed_families(tmp_path: Path, name: str) -> None:
    write_published(tmp_path / "m", name)
    convert(tmp_path / "m", tmp_path / "converted")
    ours = load_model(tmp_path / "converted")
    assert sum(isinstance(m, PackedBitLinear) for m in ours.modules()) == 14
    assert mx.array_equal(logits(ours), logits(load_model(tmp_path / "m")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised(tmp_path: Path, model_type: str, bits: int) -> None:
    save_model(tmp_path / "m", tiny_transformer(model_type, linears=None, **SIZES))
    theirs = convert(tmp_path / "m", tmp_path / "q", bits)
    ours = load_model(tmp_path / "q")
    assert sum(isinstance(m, nn.QuantizedLinear) for m in ours.modules()) == 15
    assert relative_error(logits(ours), theirs(TOKENS)) <= TOLERANCE[mx.float32]
    save_model(tmp_path / "again", ours)
    assert mx.array_equal(logits(load_model(tmp_path / "again")), logits(ours))


def test_quantised_in_several_ways(tmp_path: Path) -> None:
    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if "lm_head" in path:
            return False
        return {"group_size": 64, "bits": 8} if "down_proj" in path else True

    save_model(tmp_path / "m", tiny_transformer(linears=None, **SIZES))
    theirs = convert(tmp_path / "m", tmp_path / "q", 4, predicate)
    ours = load_model(tmp_path / "q")
    kinds = [type(module) for module in ours.modules()]
    assert kinds.count(QuantizedLinear) == 14
    assert ours.blocks[1].channel_mixer.down_proj.bits == 8
    assert relative_error(logits(ours), theirs(TOKENS)) <= TOLERANCE[mx.float32]
    save_model(tmp_path / "again", ours)
    assert mx.array_equal(logits(load_model(tmp_path / "again")), logits(ours))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_two_bits_that_are_ternary(tmp_path: Path, model_type: str) -> None:
    """A ternary model as 2-bit codes below 3, which mlx-lm runs without further code."""
    model = ternary_model(model_type)
    want = logits(model)
    save_model(tmp_path / "m", as_affine(model))
    from mlx_lm import utils

    theirs, _ = utils.load_model(tmp_path / "m")
    assert relative_error(theirs(TOKENS), want) <= TOLERANCE[mx.float32]
    ours = load_model(tmp_path / "m")
    assert sum(isinstance(m, PackedLinear) for m in ours.modules()) == 15
    assert relative_error(logits(ours), want) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("name", ["bitnet-b1.58-2B-4T", "Falcon3-1.58bit"])
def test_packed_once_more_has_lost_its_description(tmp_path: Path, name: str) -> None:
    write_published(tmp_path / "m", name)
    format = {"group_size": 32, "bits": 4}
    edit_json(tmp_path / "m" / "config.json", quantization=format, quantization_config=format)
    with pytest.raises(CheckpointError, match="what the scales of 14 packed weights mean"):
        load_model(tmp_path / "m")
