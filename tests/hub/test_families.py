"""BitNet-style transformers in their published formats: loading, saving, caching."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub import load_model, needed_bytes, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint import pack_cache
from mlx_mmfree.hub.remote.source import Source
from mlx_mmfree.layers import PackedBitLinear, pack_linears
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from tests.hub.checkpoints import (
    GOLDENS,
    edit_json,
    edit_tensors,
    logits,
    refused,
    tiny_transformer,
    write_bitnet_checkpoint,
)
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
TRANSFORMERS = sorted(
    path.name for path in GOLDENS.iterdir() if path.name.startswith(("bitnet", "llama", "onebit"))
)
# 1bitLLM's sizes are odd multiples; heads of 100 and 96 dims are published
FAMILIES: dict[str, dict[str, Any]] = {
    "bitnet": {"model_type": "bitnet", "tie_word_embeddings": True},
    "1bitLLM": {"has_sub_norms": True, "intermediate_size": 60, "head_dim": 100},
    "Falcon3": {"head_dim": 32, "linears": TernaryLinears(None, ("lm_head",))},
    "Llama3": {},
    "inner norms": {"linears": TernaryLinears(1e-6, None)},
    "ternary head": {"linears": TernaryLinears(None, ())},
}


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


@pytest.mark.sample(1, of="family")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("linear_class", [None, "bitlinear", "autobitlinear"])
def test_packed_checkpoint(tmp_path: Path, family: str, linear_class: str | None) -> None:
    model = tiny_transformer(**FAMILIES[family])
    folder = write_bitnet_checkpoint(tmp_path / "m", model, linear_class)
    want = logits(pack_linears(model))
    loaded = load_model(folder)
    ours, theirs = (dict(tree_flatten(m.parameters())) for m in (model, loaded))
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        if name.endswith("scale"):
            assert relative_error(theirs[name], array) <= 1e-7
        else:
            assert mx.array_equal(theirs[name], array), name
    assert relative_error(logits(loaded), want) <= FLOAT32
    total = sum(array.nbytes for array in theirs.values())
    assert needed_bytes(open_checkpoint(folder)) == total


@pytest.mark.sample(1, of="family")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_float_checkpoint(tmp_path: Path, family: str, dtype: mx.Dtype) -> None:
    model = tiny_transformer(**FAMILIES[family])
    model.set_dtype(dtype)
    save_model(tmp_path / "m", model)
    assert mx.array_equal(logits(load_model(tmp_path / "m", packed=False)), logits(model))
    packed = load_model(tmp_path / "m")
    # packed linears compute their norms and sums in one float32 operation
    pack_linears(model)
    assert mx.array_equal(logits(packed), logits(model))
    save_model(tmp_path / "p", packed)
    again = load_model(tmp_path / "p")
    assert again.config == packed.config == model.config
    assert mx.array_equal(logits(again), logits(model))
    refused(tmp_path / "p", "must hold float master weights to be trained", packed=False)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_saving_golden_models_loses_nothing(tmp_path: Path, name: str) -> None:
    model = load_model(GOLDENS / name)
    save_model(tmp_path / "m", model)
    again = load_model(tmp_path / "m")
    assert mx.array_equal(logits(again), logits(model))
    assert again.config == model.config
    described = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "mmfree"
    assert "linear_class" not in described


def test_scale_may_have_no_axis(tmp_path: Path) -> None:
    folder = write_bitnet_checkpoint(tmp_path / "m", tiny_transformer(), "autobitlinear")
    want = logits(load_model(folder))
    tensors = mx.load(str(weights(folder)))
    scales = {name: tensors[name].reshape(()) for name in tensors if name.endswith("_scale")}
    edit_tensors(weights(folder), **{name.replace(".", "__"): x for name, x in scales.items()})
    assert mx.array_equal(logits(load_model(folder)), want)


def test_stored_frequencies_are_not_used(tmp_path: Path) -> None:
    folder = write_bitnet_checkpoint(tmp_path / "m", tiny_transformer(), None)
    want = logits(load_model(folder))
    edit_tensors(weights(folder), model__layers__0__self_attn__rotary_emb__inv_freq=mx.zeros((3,)))
    assert mx.array_equal(logits(load_model(folder)), want)


def test_a_section_given_twice_counts_last(tmp_path: Path) -> None:
    folder = write_bitnet_checkpoint(tmp_path / "m", tiny_transformer(), None)
    want = logits(load_model(folder))
    text = (folder / "config.json").read_text()
    first = '{"quantization_config": {"modules_to_not_convert": null, "quant_method": "awq"}, '
    (folder / "config.json").write_text(first + text[1:])
    assert mx.array_equal(logits(load_model(folder)), want)


def test_already_ternary_weights_stay_as_they_are(tmp_path: Path) -> None:
    # as TriLM: dense values, several scales a matrix, no quantised activations
    save_model(tmp_path / "m", tiny_transformer(linears=None))
    edit_json(tmp_path / "m" / "config.json", pretraining_model_parallel=2, rotary_pct=1.0)
    model = load_model(tmp_path / "m")
    assert not any(isinstance(module, PackedBitLinear) for module in model.modules())
    assert mx.array_equal(logits(model), logits(load_model(tmp_path / "m", packed=False)))


class TestRefused:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_bitnet_checkpoint(tmp_path / "m", tiny_transformer(), "autobitlinear")

    NAME = "model__layers__0__self_attn__q_proj__weight"

    def test_a_linear_that_is_not_packed(self, folder: Path) -> None:
        changes = {self.NAME: mx.zeros((24, 24)), f"{self.NAME}_scale": None}
        edit_tensors(weights(folder), **changes)
        refused(folder, r"'model\.layers\.0\.self_attn\.q_proj\.weight_scale' \(1 such tensors\)")

    def test_packed_weights_where_masters_are_promised(self, folder: Path) -> None:
        described = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        }
        edit_json(folder / "config.json", quantization_config=described)
        refused(folder, r"must say in 'quantization_config', .* scales of 14 packed weights")

    def test_packed_weights_without_a_description(self, folder: Path) -> None:
        edit_json(folder / "config.json", quantization_config=...)
        refused(folder, "scales of 14 packed weights .*'model.layers.0.mlp.down_proj.weight'")

    def test_no_float_format(self, folder: Path) -> None:
        refused(
            folder, "must hold float master weights to be trained but holds packed", packed=False
        )

    def test_code_three(self, folder: Path) -> None:
        packed = mx.load(str(weights(folder)))[self.NAME.replace("__", ".")]
        packed = mx.where(mx.arange(24) == 5, mx.array(12, mx.uint8), packed)
        edit_tensors(weights(folder), **{self.NAME: packed})
        refused(folder, "must hold ternary codes")

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_scale(self, folder: Path, value: float) -> None:
        edit_tensors(weights(folder), **{f"{self.NAME}_scale": mx.array([value])})
        refused(folder, r"weight_scale' .*must be")

    def test_shape_and_dtype(self, folder: Path) -> None:
        for array, message in [
            (mx.zeros((24, 24), mx.uint8), r"must have shape \(6, 24\)"),
            (mx.zeros((6, 24)), "must be uint8 but is float32"),
            (mx.zeros((6, 24), mx.int8), "must be uint8 but is int8"),
        ]:
            edit_tensors(weights(folder), **{self.NAME: array})
            refused(folder, message)

    @pytest.mark.parametrize("method", ["gptq", "fp8", None, 3])
    def test_other_methods(self, folder: Path, method: Any) -> None:
        edit_json(folder / "config.json", quantization_config={"quant_method": method})
        with pytest.raises(UnsupportedModelError, match=r"'quantization_config' must be .*bitnet"):
            load_model(folder)

    def test_not_for_every_architecture(self, tmp_path: Path) -> None:
        shutil.copytree(GOLDENS / "hgrn_default", tmp_path / "m", copy_function=shutil.copyfile)
        edit_json(tmp_path / "m" / "config.json", quantization_config={"quant_method": "bitnet"})
        with pytest.raises(UnsupportedModelError, match="'quantization_config' must be"):
            load_model(tmp_path / "m")


class TestLatent:
    """Float weights of ternary Llamas are masters, or are meant as they are stored."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        save_model(tmp_path / "m", tiny_transformer())
        return tmp_path / "m"

    @pytest.mark.parametrize(
        "keys",
        [
            {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": None}},
            {"quantization_config": ..., "is_bitnet_config": True},
        ],
        ids=str,
    )
    def test_asks_where_the_configuration_is_silent(
        self, folder: Path, keys: dict[str, Any]
    ) -> None:
        masters = logits(load_model(folder))
        edit_json(folder / "config.json", **keys)
        refused(folder, "'latent' must be given")
        assert mx.array_equal(logits(load_model(folder, latent=True)), masters)
        as_stored = load_model(folder, latent=False)
        assert as_stored.config.linears is None
        assert not mx.array_equal(logits(as_stored), masters)

    def test_answer_beats_the_configuration(self, folder: Path) -> None:
        assert load_model(folder, latent=False).config.linears is None
        edit_json(folder / "config.json", quantization_config=...)
        assert load_model(folder).config.linears is None
        assert load_model(folder, latent=True).config.linears == TernaryLinears()

    @pytest.mark.parametrize(
        ("revision", "is_ternary"), [("prequantized", True), ("bfloat16", False)]
    )
    def test_revisions_of_falcon_e(
        self, folder: Path, revision: str, is_ternary: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        edit_json(folder / "config.json", quantization_config=..., is_bitnet_config=True)
        monkeypatch.setattr(Source, "fetch", lambda *_: folder)
        model = load_model("tiiuae/Falcon-E-1B-Base", revision)
        assert (model.config.linears is not None) == is_ternary

    @pytest.mark.parametrize("latent", [True, False])
    def test_no_question(self, tmp_path: Path, latent: bool) -> None:
        write_bitnet_checkpoint(tmp_path / "p", tiny_transformer(), None)
        refused(tmp_path / "p", "'latent' must be left out for packed weights", latent=latent)
        for name in ("hgrn_default", "bitnet_online_bf16"):
            with pytest.raises(UnsupportedModelError, match="'latent' must be left out for 'model"):
                load_model(GOLDENS / name, latent=latent)


class TestCache:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 0)
        monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    @pytest.mark.parametrize("family", FAMILIES)
    def test_keeps_what_was_ternarised(
        self, tmp_path: Path, cache: Path, family: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_model(tmp_path / "m", tiny_transformer(**FAMILIES[family]))
        first = load_model(tmp_path / "m")
        assert "is kept in" in capsys.readouterr().err
        second = load_model(tmp_path / "m")
        assert capsys.readouterr().err == ""
        assert second.config == first.config
        assert mx.array_equal(logits(second), logits(first))

    def test_leaves_packed_checkpoints_alone(self, tmp_path: Path, cache: Path) -> None:
        load_model(write_bitnet_checkpoint(tmp_path / "m", tiny_transformer(), None))
        assert not cache.exists()
