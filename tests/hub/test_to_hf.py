"""Transformers' format: read back exactly, here and by transformers."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import demo
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.formats import bitnet
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.ops import pack_ternary
from tests.hub.checkpoints import GOLDENS, tiny_checkpoint, tiny_transformer
from tests.hub.test_adapters import LLAMA, build
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.array([[1, 7, 3, 39, 0, 12, 5]])
SIZES: dict[str, Any] = {"hidden_size": 32, "head_dim": 8, "initializer_range": 0.05}
MASTERS = FloatFormats(keep_masters=True)


def parameters(source: Path, **options: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(load_model(source, **options).parameters()))


def assert_same(left: Path, right: Path, **options: Any) -> None:
    want, got = parameters(left, **options), parameters(right, **options)
    assert set(want) == set(got)
    for name, array in want.items():
        assert array.dtype == got[name].dtype and mx.array_equal(array, got[name]), name


@pytest.mark.parametrize("rows", [4, 12, 64])
@pytest.mark.parametrize("columns", [1, 31, 32, 70])
def test_packing_is_the_inverse_of_reading(rows: int, columns: int) -> None:
    trits = mx.random.randint(-1, 2, (rows, columns))
    words = pack_ternary(trits)
    packed = bitnet.pack(words, columns)
    codes, quarter = np.array(trits) + 1, rows // 4
    want = sum(codes[n * quarter : (n + 1) * quarter] << 2 * n for n in range(4))
    assert packed.dtype == mx.uint8
    np.testing.assert_array_equal(np.array(packed), want)
    assert mx.array_equal(bitnet.repack(packed, rows), words)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["bitnet_packed", "bitnet_online_bf16", "llama_bitlinear_headdim"])
def test_packed(tmp_path: Path, name: str) -> None:
    report = convert(open_checkpoint(GOLDENS / name), tmp_path / "m", to="hf")
    assert report.total.difference == 0 and report.logits_difference == 0
    assert_same(GOLDENS / name, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    described = {"linear_class": "autobitlinear", "quantization_mode": "offline"}
    assert config["quantization_config"].items() >= described.items()
    convert(open_checkpoint(tmp_path / "m"), tmp_path / "mlx", check=False)
    assert_same(GOLDENS / name, tmp_path / "mlx")


@pytest.mark.parametrize("name", ["hgrn_default", "hgrn_tied", "bitnet_online_bf16"])
def test_masters(tmp_path: Path, name: str) -> None:
    convert(open_checkpoint(GOLDENS / name), tmp_path / "m", to="hf", formats=MASTERS, check=False)
    assert_same(GOLDENS / name, tmp_path / "m", packed=False)
    assert_same(GOLDENS / name, tmp_path / "m")


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, None], ids=str)
def test_codes_are_rounded_once(tmp_path: Path, bits: int, dtype: mx.Dtype | None) -> None:
    """The scales of a layer give the dtype; `None`: two layers' scales differ from the embedding's."""
    model = build(LLAMA | {"tie_word_embeddings": bits == 8})
    model.set_dtype(dtype or mx.bfloat16)
    if dtype is None:
        model.blocks[0].token_mixer.set_dtype(mx.float16)
        model.blocks[1].token_mixer.set_dtype(mx.float32)
    quantised = {"embed", "head", "query_proj", "key_proj", "value_proj", "up_proj"}
    nn.quantize(
        model, 32, bits, class_predicate=lambda path, _: path.rpartition(".")[2] in quantised
    )
    save_model(tmp_path / "mlx", model)
    report = convert(open_checkpoint(tmp_path / "mlx"), tmp_path / "hf", to="hf")
    stored, written = (
        mx.load(str(tmp_path / name / "model.safetensors")) for name in ("mlx", "hf")
    )
    errors = [0.0]
    for name in (name for name in stored if name.endswith(".scales")):
        weight = name.replace(".scales", ".weight")
        scales, biases = (
            np.repeat(np.array(stored[name.replace("scales", key)].astype(mx.float32)), 32, axis=1)
            for key in ("scales", "biases")
        )
        ones = mx.ones((len(scales), scales.shape[1] // 32))
        codes = np.array(mx.dequantize(stored[weight], ones, 0 * ones, 32, bits))
        exact = codes.astype(np.float64) * scales + biases
        if stored[name].dtype == mx.float32:
            assert np.abs(np.array(written[weight]) - exact).max() <= 1e-7
            continue
        want = mx.array(exact.astype(np.float32)).astype(stored[name].dtype)
        assert mx.array_equal(written[weight], want)
        errors.append(float(np.abs(np.array(want.astype(mx.float32)) - exact).max()))
    assert report.total.difference == pytest.approx(max(errors), abs=1e-7)
    assert report.is_lossless == (report.total.difference == 0.0)
    assert report.logits_difference is not None and report.logits_difference < 0.02


def test_affine_weights_are_written_out(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    save_model(tmp_path / "s", tiny_transformer("qwen3", linears=None, **sizes))
    formats = FloatFormats(ternarize_groups=True)
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "g", formats=formats, check=False)
    report = convert(open_checkpoint(tmp_path / "g"), tmp_path / "m", to="hf")
    assert report.total.difference == 0
    affine, dense = load_model(tmp_path / "g"), load_model(tmp_path / "m", packed=False)
    module = affine.blocks[0].channel_mixer.down_proj
    want = mx.dequantize(module.weight, module.scales, module.biases, group_size=128, bits=2)
    assert mx.array_equal(dense.blocks[0].channel_mixer.down_proj.weight, want)
    assert relative_error(dense(TOKENS)[0], affine(TOKENS)[0]) <= TOLERANCE[mx.float32]


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "formats", "text"),
        [
            ({}, FloatFormats(embed_bits=4), "'embed_bits' must be left out"),
            ({}, FloatFormats(head_bits=4), "'head_bits' must be left out"),
            ({}, FloatFormats(ternarize_groups=True), "'ternarize' must be 'tensor'"),
            ({"attention_bias": True}, FloatFormats(), "no bias"),
            ({"intermediate_size": 42}, FloatFormats(), "a multiple of 4"),
        ],
        ids=str,
    )
    def test_what_transformers_lacks(
        self, tmp_path: Path, options: dict[str, Any], formats: FloatFormats, text: str
    ) -> None:
        save_model(tmp_path / "s", tiny_transformer(**options))
        with pytest.raises(UnsupportedModelError, match=text):
            convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", to="hf", formats=formats)

    def test_masters_that_are_gone(self, tmp_path: Path) -> None:
        source = open_checkpoint(GOLDENS / "bitnet_packed")
        words = (
            r"packed weights alone\. Possible: .*--to gguf.* without 'keep_masters'\. Or convert"
        )
        with pytest.raises(UnsupportedModelError, match=words):
            convert(source, tmp_path / "m", to="hf", formats=MASTERS)

    @pytest.mark.parametrize("formats", [FloatFormats(), MASTERS], ids=["packed", "masters"])
    def test_packed_weights_without_a_format(self, tmp_path: Path, formats: FloatFormats) -> None:
        words = r"no format for its packed weights, .*--to mlx.*--rebuild-masters"
        with pytest.raises(UnsupportedModelError, match=words):
            convert(open_checkpoint(demo.path()), tmp_path / "m", to="hf", formats=formats)

    def test_packed_matmul_free_model(self, tmp_path: Path) -> None:
        source = open_checkpoint(tiny_checkpoint(tmp_path / "s"))
        with pytest.raises(UnsupportedModelError, match="'keep_masters' must be given"):
            convert(source, tmp_path / "m", to="hf")


@pytest.mark.interop
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "bitnet", "qwen3"])
def test_transformers_reads_it(tmp_path: Path, model_type: str, masters: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    save_model(tmp_path / "s", tiny_transformer(model_type, **SIZES))
    formats = FloatFormats(keep_masters=masters)
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", to="hf", formats=formats, check=False)
    ours = load_model(tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    linear = theirs.model.layers[1].mlp.down_proj
    layer = ours.blocks[1].channel_mixer.down_proj
    assert type(linear).__name__ == "AutoBitLinear"
    if not masters:
        assert float(linear.weight_scale) == layer.scale.item()
        codes = mx.array(linear.weight.detach().to(torch.int32).numpy())
        assert mx.array_equal(pack_ternary(codes), layer.weight)
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS.tolist())).logits.numpy()
    assert relative_error(ours(TOKENS)[0], mx.array(want)) <= TOLERANCE[mx.float32]
