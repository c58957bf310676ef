"""Merged adapters: what the result computes, and what its folder says it is."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.checkpoint.checkpoint import read_tensor_entries
from mlx_mmfree.hub.conversion.fuse import fuse
from mlx_mmfree.layers import Linear, PackedBitLinear, pack_linears
from mlx_mmfree.layers.lora import AdapterKind
from mlx_mmfree.models import Decoder
from mlx_mmfree.ops import ternarize
from tests.hub.test_adapters import HGRN, LLAMA, TOKENS, adapted, build, change
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
BITNET = LLAMA | {
    "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}
}


def _float_activations(model: Decoder) -> Decoder:
    for module in model.modules():
        if isinstance(module, PackedBitLinear):
            module._quantize_activations = False
    return model


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dense_base_keeps_the_result(tmp_path: Path, kind: AdapterKind) -> None:
    model = adapted(LLAMA, kind, ("_proj", "embed", "head"))
    want = model(TOKENS)[0]
    fuse(model, "dense")
    assert relative_error(model(TOKENS)[0], want) <= FLOAT32
    save_model(tmp_path / "fused", model)
    assert relative_error(load_model(tmp_path / "fused")(TOKENS)[0], want) <= FLOAT32


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_ternary_base_becomes_dense(tmp_path: Path, kind: AdapterKind) -> None:
    model = _float_activations(adapted(BITNET, kind, ("query_proj", "down_proj"), packed=True))
    want = model(TOKENS)[0]
    fuse(model, "dense")
    assert type(model.blocks[0].token_mixer.query_proj) is Linear
    assert type(model.blocks[0].token_mixer.key_proj) is PackedBitLinear
    assert relative_error(model(TOKENS)[0], want) <= FLOAT32
    save_model(tmp_path / "fused", model)
    loaded = _float_activations(load_model(tmp_path / "fused"))
    assert relative_error(loaded(TOKENS)[0], want) <= FLOAT32


@pytest.mark.parametrize("config", [BITNET, HGRN], ids=["bitnet", "hgrn"])
def test_ternary_again_is_the_rounded_sum(tmp_path: Path, config: dict) -> None:
    model = adapted(config, "lora", packed=True)
    sums = {
        name: layer.matrix.multiply(mx.eye(layer.matrix.input_dims)).T
        + layer.scale * (layer.lora_a @ layer.lora_b).T
        for name, layer in model.named_modules()
        if "lora_a" in layer
    }
    fuse(model, "ternary")
    fused = dict(model.named_modules())
    for name, weight in sums.items():
        trits, scale = ternarize(weight)
        matrix = fused[name].multiply(mx.eye(weight.shape[1])).T
        assert relative_error(matrix, trits * scale) <= FLOAT32
    save_model(tmp_path / "fused", model)
    assert relative_error(load_model(tmp_path / "fused")(TOKENS)[0], model(TOKENS)[0]) <= FLOAT32


def test_norms_inside_have_no_dense_variant() -> None:
    model = adapted(HGRN, "lora", packed=True)
    pack_linears(model)
    with pytest.raises(UnsupportedModelError, match="'format' must be 'ternary'"):
        fuse(model, "dense")


def test_a_model_without_an_adapter_is_refused() -> None:
    model = adapted(LLAMA, "lora")
    fuse(model, "dense")
    with pytest.raises(ValueError, match=r"'model' must have an adapter on it but has none\. Load"):
        fuse(model, "dense")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("config", [LLAMA, BITNET], ids=["llama", "bitnet"])
def test_dense_layers_keep_the_dtype_of_the_checkpoint(
    tmp_path: Path, config: dict, dtype: mx.Dtype
) -> None:
    model = build(config)
    model.set_dtype(dtype)
    save_model(tmp_path / "base", pack_linears(model))
    model = change(load_model(tmp_path / "base"), "lora", ("query_proj", "embed"))
    save_model(tmp_path / "fused", fuse(model, "dense"))
    tensors = read_tensor_entries(tmp_path / "fused")
    floats = {n: t.dtype for n, t in tensors.items() if n.endswith(("norm.weight", "_proj.weight"))}
    assert set(floats.values()) - {mx.uint32, mx.uint8} == {dtype}
    assert tensors["model.embed_tokens.weight"].dtype == dtype


def test_each_dense_layer_keeps_its_own_dtype() -> None:
    model = build(LLAMA)
    mixer = model.blocks[0].token_mixer
    mixer.query_proj.set_dtype(mx.float16)
    mixer.key_proj.set_dtype(mx.bfloat16)
    mixer.key_proj = mixer.key_proj.to_quantized(32, 4)
    fuse(change(model, "lora", ("embed", "blocks.0.token_mixer.query_proj", "key_proj")), "dense")
    layers = (model.embed, mixer.query_proj, mixer.key_proj, model.blocks[1].token_mixer.key_proj)
    dtypes = [layer.weight.dtype for layer in layers]
    assert dtypes == [mx.float32, mx.float16, mx.bfloat16, mx.float32]
