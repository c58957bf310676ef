"""MLX's format: exact for this library, and really run by mlx-lm without it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.conversion.to_folder import MODEL_FILE, FloatFormats
from mlx_mmfree.models.parts.rotation import Rotation
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.ops.backend.dispatch import use_backend
from tests.hub.checkpoints import (
    GOLDENS,
    edit_tensors,
    tiny_checkpoint,
    tiny_model,
    tiny_transformer,
    weight_only,
)
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

TOKENS = mx.array([[1, 7, 3, 39, 0, 12, 5]])
BIG: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LLAMA3 = Rotation(theta=5e5, scaling="llama3", factor=8.0, trained_length=16)


def mlx_lm_model(folder: Path) -> nn.Module:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    model, _ = load_with_mlx_lm(folder, trust_remote_code=True)
    return model


def same_parameters(left: Path, right: Path) -> bool:
    a, b = (dict(tree_flatten(load_model(folder).parameters())) for folder in (left, right))
    return set(a) == set(b) and all(
        a[name].dtype == b[name].dtype and mx.array_equal(a[name], b[name]).item() for name in a
    )


def stored(folder: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "model.safetensors")))


GOLDEN_CASES = [
    ("hgrn_default", "mmfree_model.py"),
    ("hgrn_tied", "mmfree_model.py"),
    ("hgrn_expand2", "mmfree_model.py"),
    ("hgrn_conv_shared", "mmfree_model.py"),
    ("hgrn_conv_separate", "mmfree_model.py"),
    ("hgrn_no_lower_bound", "mmfree_model.py"),
    ("bitnet_packed", "mmfree_model.py"),
    ("bitnet_online_train", "mmfree_model.py"),
    ("onebit_llama_fp16", "mmfree_model.py"),
    ("llama_autobit_rmsnorm", "mmfree_model.py"),
    ("llama_bitlinear_headdim", None),
    ("llama_bitlinear_rope3", None),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "model_file"), GOLDEN_CASES)
def test_reference_checkpoints(tmp_path: Path, name: str, model_file: str | None) -> None:
    source, target = GOLDENS / name, tmp_path / "m"
    report = convert(open_checkpoint(source), target)
    assert report.total.difference == 0 and report.logits_difference == 0
    assert same_parameters(source, target)
    assert (target / (model_file or "config.json")).is_file()
    assert json.loads((target / "config.json").read_text()).get("model_file") == model_file
    theirs, ours = mlx_lm_model(target), weight_only(target)
    assert type(theirs).__module__ == ("custom_model" if model_file else "mlx_lm.models.llama")
    got, want = theirs(TOKENS), ours(TOKENS)[0]
    if got.dtype == mx.float32:
        assert relative_error(got, want) <= TOLERANCE[mx.float32]
    else:
        assert relative_error(got, want) <= TOLERANCE[mx.bfloat16]


SCALES = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 16.0}
OTHERS = [
    ({"model_type": "llama", **BIG}, None),
    ({"model_type": "llama", **BIG, "attention_bias": True, "mlp_bias": True}, None),
    ({"model_type": "llama", **BIG, "linears": TernaryLinears(excluded=("o_proj",))}, None),
    ({"model_type": "llama", **BIG, "rotation": LLAMA3, "tie_word_embeddings": True}, None),
    ({"model_type": "llama", "head_dim": 6}, "mmfree_model.py"),
    ({"model_type": "qwen3", **BIG}, None),
    ({"model_type": "qwen3", **BIG, "attention_bias": True}, "mmfree_model.py"),
    ({"model_type": "minicpm", **BIG, **SCALES}, None),
    ({"model_type": "minicpm", **BIG, **SCALES, "tie_word_embeddings": True}, "mmfree_model.py"),
    ({"model_type": "bitnet", **BIG, "tie_word_embeddings": True}, "mmfree_model.py"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("options", "model_file"), OTHERS, ids=str)
def test_transformers(tmp_path: Path, options: dict[str, Any], model_file: str | None) -> None:
    model = tiny_transformer(**options)
    mx.random.seed(1)
    for block in model.blocks:
        for module in (block.token_mixer.query_proj, block.channel_mixer.down_proj):
            if "bias" in module:
                module.bias = mx.random.normal(module.bias.shape)
    save_model(tmp_path / "s", model)
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", check=False)
    assert same_parameters(tmp_path / "s", tmp_path / "m")
    assert json.loads((tmp_path / "m/config.json").read_text()).get("model_file") == model_file
    want = weight_only(tmp_path / "m")(TOKENS)[0]
    assert relative_error(mlx_lm_model(tmp_path / "m")(TOKENS), want) <= TOLERANCE[mx.float32]


def test_dense_model_in_another_dtype(tmp_path: Path) -> None:
    save_model(tmp_path / "s", tiny_transformer("qwen3", linears=None))
    formats = FloatFormats(dtype=mx.float16)
    report = convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", formats=formats)
    assert 0 < report.total.difference < 1e-3
    assert {array.dtype for array in stored(tmp_path / "m").values()} == {mx.float16}
    want, got = stored(tmp_path / "s"), stored(tmp_path / "m")
    assert all(mx.array_equal(want[name].astype(mx.float16), got[name]) for name in want)
    theirs = mlx_lm_model(tmp_path / "m")(TOKENS)
    ours = load_model(tmp_path / "m")(TOKENS)[0]
    assert relative_error(theirs, ours) <= TOLERANCE[mx.float16]


def test_exact_scales_lie_beside_rounded_ones(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "s")
    source = open_checkpoint(tmp_path / "s")
    convert(source, tmp_path / "m", formats=FloatFormats(dtype=mx.bfloat16), check=False)
    name = "model.layers.0.mlp.down_proj"
    tensors = stored(tmp_path / "m")
    exact = mx.load(str(tmp_path / "m" / "ternary_scales.safetensors"))[f"{name}.weight_scale"]
    scale = load_model(source).blocks[0].channel_mixer.down_proj.scale
    assert mx.array_equal(exact, scale) and exact.dtype == mx.float32
    rounded = scale.astype(mx.bfloat16)
    assert rounded.astype(mx.float32).item() != scale.item()
    # 40 inputs are padded to 64
    assert tensors[f"{name}.scales"].shape == (24, 1)
    assert mx.array_equal(tensors[f"{name}.scales"], mx.broadcast_to(rounded, (24, 1)))
    assert mx.array_equal(tensors[f"{name}.biases"], -tensors[f"{name}.scales"])


def test_is_the_affine_format_of_mlx(tmp_path: Path) -> None:
    save_model(tmp_path / "s", tiny_transformer(**BIG))
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", check=False)
    tensors, config = stored(tmp_path / "m"), json.loads((tmp_path / "m/config.json").read_text())
    module = load_model(tmp_path / "m").blocks[1].channel_mixer.down_proj
    name = "model.layers.1.mlp.down_proj"
    assert config["quantization"][name] == {"bits": 2, "group_size": 32, "mode": "affine"}
    parts = (tensors[f"{name}.{key}"] for key in ("weight", "scales", "biases"))
    got = mx.dequantize(*parts, group_size=32, bits=2)
    identity = np.eye(96, dtype=np.float32)
    module._quantize_activations = False
    assert mx.array_equal(got, module(mx.array(identity)).T)
    _, metadata = mx.load(str(tmp_path / "m/model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert list(config) == sorted(config)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_in_few_bits(tmp_path: Path, bits: int, tied: bool) -> None:
    save_model(tmp_path / "s", tiny_transformer(**BIG, tie_word_embeddings=tied))
    formats = FloatFormats(embed_bits=bits, head_bits=None if tied else bits)
    report = convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", formats=formats)
    model = load_model(tmp_path / "m")
    assert (model.embed.bits, model.embed.group_size) == (bits, 64)
    assert tied or model.head.bits == bits
    weight = load_model(tmp_path / "s").embed.weight
    want = mx.quantize(weight, group_size=64, bits=bits)
    for key, array in zip(("weight", "scales", "biases"), want, strict=True):
        assert mx.array_equal(model.embed[key], array)
    error = mx.abs(mx.dequantize(*want, group_size=64, bits=bits) - weight).max().item()
    assert report.groups["embedding and head"].difference >= error > 0
    # the CPU's own product with codes rounds activations
    with use_backend("reference"):
        ours = weight_only(tmp_path / "m")(TOKENS)[0]
        mx.eval(ours)
    assert relative_error(mlx_lm_model(tmp_path / "m")(TOKENS), ours) <= TOLERANCE[mx.float32]
    save_model(tmp_path / "again", model)
    assert same_parameters(tmp_path / "again", tmp_path / "m")


def test_matmul_free_model_with_an_embedding_in_few_bits(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "s", hidden_size=32)
    formats = FloatFormats(embed_bits=8, dtype=mx.float32)
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", formats=formats, check=False)
    assert load_model(tmp_path / "m").embed.group_size == 32
    ours = weight_only(tmp_path / "m")(TOKENS)[0]
    assert relative_error(mlx_lm_model(tmp_path / "m")(TOKENS), ours) <= TOLERANCE[mx.float32]


def test_an_embedding_in_few_bits_keeps_its_codes_in_another_dtype(tmp_path: Path) -> None:
    save_model(tmp_path / "s", tiny_transformer(**BIG))
    convert(
        open_checkpoint(tmp_path / "s"),
        tmp_path / "m",
        formats=FloatFormats(embed_bits=4),
        check=False,
    )
    formats = FloatFormats(dtype=mx.float16)
    convert(open_checkpoint(tmp_path / "m"), tmp_path / "half", formats=formats, check=False)
    first, second = (load_model(tmp_path / name).embed for name in ("m", "half"))
    assert second.weight.dtype == mx.uint32 and mx.array_equal(second.weight, first.weight)
    assert second.scales.dtype == mx.float16
    assert mx.array_equal(second.scales, first.scales.astype(mx.float16))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["hgrn_bit", "llama", "bitnet"])
def test_mlx_lm_generates_what_one_pass_gives(tmp_path: Path, kind: str) -> None:
    from mlx_lm import batch_generate, load
    from mlx_lm.generate import generate_step

    sizes: dict[str, Any] = {"vocab_size": 518, **BIG}
    model = (
        tiny_transformer(kind, **sizes)
        if kind != "hgrn_bit"
        else tiny_model(vocab_size=518, conv_size=3, hidden_size=64)
    )
    save_model(tmp_path / "s", model, GOLDENS / "tokenizer_bpe")
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", check=False)
    theirs, tokenizer = load(str(tmp_path / "m"), trust_remote_code=True)
    prompt = list(range(40, 57))
    steps = generate_step(mx.array(prompt), theirs, max_tokens=6, prefill_step_size=5)
    tokens = [int(token) for token, _ in steps]
    for _ in range(6):
        logits = weight_only(tmp_path / "m")(mx.array([prompt]))[0][0, -1]
        prompt.append(int(mx.argmax(logits).item()))
    assert tokens == prompt[17:]
    prompts = [list(range(60, 70)), list(range(80, 83))]
    together = batch_generate(theirs, tokenizer, prompts, max_tokens=5).texts
    alone = [batch_generate(theirs, tokenizer, [p], max_tokens=5).texts[0] for p in prompts]
    assert together == alone


def test_already_affine_model_is_kept(tmp_path: Path) -> None:
    save_model(
        tmp_path / "s", tiny_transformer("llama", linears=None, **(BIG | {"hidden_size": 128}))
    )
    formats = FloatFormats(ternarize_groups=True)
    with pytest.raises(UnsupportedModelError, match="128 does not divide the 96 inputs"):
        convert(open_checkpoint(tmp_path / "s"), tmp_path / "g", formats=formats)
    sizes = {**BIG, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    save_model(tmp_path / "t", tiny_transformer("llama", linears=None, **sizes))
    convert(open_checkpoint(tmp_path / "t"), tmp_path / "g", formats=formats, check=False)
    report = convert(open_checkpoint(tmp_path / "g"), tmp_path / "m")
    assert report.total.difference == 0
    assert stored(tmp_path / "g").keys() == stored(tmp_path / "m").keys()
    assert same_parameters(tmp_path / "g", tmp_path / "m")
    ours = load_model(tmp_path / "m")(TOKENS)[0]
    assert relative_error(mlx_lm_model(tmp_path / "m")(TOKENS), ours) <= TOLERANCE[mx.float32]


def test_the_model_file_stands_alone() -> None:
    text = MODEL_FILE.read_text()
    assert "mlx_mmfree" not in text
    assert "from ." not in text and "__future__" not in text


class TestRefused:
    def test_missing_exact_scales(self, tmp_path: Path) -> None:
        convert(open_checkpoint(tiny_checkpoint(tmp_path / "s")), tmp_path / "m", check=False)
        (tmp_path / "m" / "ternary_scales.safetensors").unlink()
        with pytest.raises(CheckpointError):
            load_model(tmp_path / "m")

    @pytest.mark.parametrize("name", ["model.norm__weight", "model__norm__weight_scale"])
    def test_other_tensors_among_the_scales(self, tmp_path: Path, name: str) -> None:
        convert(open_checkpoint(tiny_checkpoint(tmp_path / "s")), tmp_path / "m", check=False)
        edit_tensors(tmp_path / "m" / "ternary_scales.safetensors", **{name: mx.ones(1)})
        with pytest.raises(CheckpointError, match=r"nothing but scales|unexpected"):
            load_model(tmp_path / "m")

    @pytest.mark.parametrize(
        ("options", "formats", "text"),
        [
            ({}, FloatFormats(head_bits=4), "its head is ternary"),
            (
                {"linear_class": "dense", "tie_word_embeddings": True},
                FloatFormats(head_bits=4),
                "Use",
            ),
            ({}, FloatFormats(embed_bits=4), "no group of 32 divides its 24 dims"),
        ],
    )
    def test_bits_that_do_not_fit(
        self, tmp_path: Path, options: dict[str, Any], formats: FloatFormats, text: str
    ) -> None:
        source = open_checkpoint(tiny_checkpoint(tmp_path / "s", **options))
        with pytest.raises(UnsupportedModelError, match=text):
            convert(source, tmp_path / "m", formats=formats)
        assert not (tmp_path / "m").exists()

    def test_mlx_lm_asks_before_it_runs_code(self, tmp_path: Path) -> None:
        from mlx_lm.utils import load_model as load_with_mlx_lm

        convert(open_checkpoint(tiny_checkpoint(tmp_path / "s")), tmp_path / "m", check=False)
        with pytest.raises(ValueError, match="trust_remote_code"):
            load_with_mlx_lm(tmp_path / "m")


def test_shards_are_read_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_mmfree.files import tensors as safetensors_writer

    save_model(tmp_path / "s", tiny_transformer(**BIG))
    monkeypatch.setattr(safetensors_writer, "MAX_SHARD_BYTES", 20_000)
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", check=False)
    names = sorted(file.name for file in (tmp_path / "m").glob("model-*.safetensors"))
    assert len(names) > 2 and not (tmp_path / "m" / "model.safetensors").exists()
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == names
    assert same_parameters(tmp_path / "s", tmp_path / "m")
    ours = weight_only(tmp_path / "m")(TOKENS)[0]
    assert relative_error(mlx_lm_model(tmp_path / "m")(TOKENS), ours) <= TOLERANCE[mx.float32]
