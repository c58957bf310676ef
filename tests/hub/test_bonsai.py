"""Bonsai: Qwen3 in MLX's affine format of 1 or 2 bits, as MLX and mlx-lm write it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.hub import load_model, needed_bytes, open_checkpoint, save_model
from mlx_mmfree.layers import PackedLinear, QuantizedLinear
from tests.hub.checkpoints import TOKENS, edit_json, edit_tensors, logits, tiny_transformer
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
GROUP = 128


def ternary_groups(weight: mx.array) -> mx.array:
    """Each group of inputs is `{-s, 0, s}` with its own scale."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scales = mx.mean(mx.abs(groups), axis=-1, keepdims=True)
    return (mx.clip(mx.round(groups / scales), -1, 1) * scales).reshape(weight.shape)


def write(folder: Path, *, tied: bool, dtype: mx.Dtype = mx.float32, bits: int = 2) -> Path:
    """Writes a checkpoint from the definition of the format: `code * scale + bias`."""
    folder.mkdir()
    mx.random.seed(1)
    dims, width, heads = 128, 256, 64
    shapes = {"model.embed_tokens": (40, dims)} | ({} if tied else {"lm_head": (40, dims)})
    norms = {"model.norm": dims}
    for n in range(2):
        layer = f"model.layers.{n}"
        for name, size in [("q", 4 * heads), ("k", 2 * heads), ("v", 2 * heads)]:
            shapes[f"{layer}.self_attn.{name}_proj"] = (size, dims)
        shapes[f"{layer}.self_attn.o_proj"] = (dims, 4 * heads)
        shapes |= {f"{layer}.mlp.{name}_proj": (width, dims) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (dims, width)
        norms |= {f"{layer}.self_attn.{name}_norm": heads for name in "qk"}
        norms |= {f"{layer}.{name}_layernorm": dims for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": 1 + 0.1 * mx.random.normal((n,)) for name, n in norms.items()}
    for name, (rows, columns) in shapes.items():
        words = (rows, columns * bits // 32, 32 // bits)
        codes = mx.random.randint(0, bits + 1, words).astype(mx.uint32)
        scales = mx.random.uniform(0.05, 0.15, (rows, columns // GROUP))
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        tensors[f"{name}.weight"] = (codes << shifts).sum(axis=-1).astype(mx.uint32)
        # from -s, one step to s with 1 bit, two with 2
        step = 2 * scales if bits == 1 else scales
        tensors |= {f"{name}.scales": step, f"{name}.biases": -scales}
    floats = {name: x.astype(dtype) for name, x in tensors.items() if x.dtype != mx.uint32}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors | floats)
    format = {"group_size": GROUP, "bits": bits}
    config = CONFIG | {"tie_word_embeddings": tied}
    config |= {"quantization": format, "quantization_config": format}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dense_twin(folder: Path, target: Path) -> Path:
    """The same model with its weights written out."""
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    config = json.loads((folder / "config.json").read_text())
    bits = config["quantization"]["bits"]
    for name in [key.removesuffix(".scales") for key in tensors if key.endswith(".scales")]:
        scales, biases = tensors.pop(f"{name}.scales"), tensors.pop(f"{name}.biases")
        tensors[f"{name}.weight"] = mx.dequantize(
            tensors[f"{name}.weight"], scales, biases, group_size=GROUP, bits=int(bits)
        )
    target.mkdir()
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    del config["quantization"], config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.sample(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("bits", [1, 2])
def test_equals_the_dense_model(tmp_path: Path, tied: bool, dtype: mx.Dtype, bits: int) -> None:
    folder = write(tmp_path / "m", tied=tied, dtype=dtype, bits=bits)
    assert load_model(folder).dtype == dtype
    model = load_model(folder, dtype=mx.float32)
    dense = load_model(dense_twin(folder, tmp_path / "d"), dtype=mx.float32)
    kinds = [type(module) for module in model.modules()]
    # of two bits, rows of one group have one scale
    assert kinds.count(PackedLinear) == (11 - tied if bits == 2 else 0)
    assert kinds.count(QuantizedLinear) == (4 if bits == 2 else 15 - tied)
    # the twin's weights were rounded to the file's dtype once more
    assert relative_error(logits(model), logits(dense)) <= 4 * TOLERANCE[dtype]


def test_formats_of_single_modules(tmp_path: Path) -> None:
    """Sections as mlx-lm writes what its predicate returns, with whole numbers as writers of JSON do."""
    from mlx_lm.utils import load_model as load_by_mlx_lm

    folder = write(tmp_path / "m", tied=False)
    plain = logits(load_model(folder))
    own = {"group_size": float(GROUP), "bits": 2.0, "mode": "affine"}
    described = {**own, "model.embed_tokens": True, "model.layers.0.mlp.down_proj": own}
    edit_json(folder / "config.json", quantization=described, quantization_config=described)
    assert mx.array_equal(logits(load_model(folder)), plain)
    dense = "model.layers.1.mlp.up_proj"
    twin = dict(mx.load(str(dense_twin(folder, tmp_path / "d") / "model.safetensors")))
    edit_tensors(
        folder / "model.safetensors",
        **{f"{dense}.weight": twin[f"{dense}.weight"]},
        **{f"{dense}.scales": None, f"{dense}.biases": None},
    )
    described = {"group_size": GROUP, "bits": 2, "model.embed_tokens": True, dense: False}
    edit_json(folder / "config.json", quantization=described, quantization_config=described)
    theirs, _ = load_by_mlx_lm(folder)
    got = logits(load_model(folder))
    assert relative_error(got, theirs(TOKENS)) <= TOLERANCE[mx.float32]
    assert relative_error(got, plain) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dtype", [None, mx.bfloat16], ids=str)
def test_saves_and_counts_bytes(tmp_path: Path, dtype: mx.Dtype | None, bits: int) -> None:
    folder = write(tmp_path / "m", tied=False, bits=bits)
    model = load_model(folder, dtype=dtype)
    total = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    # the scales of rows of one group become one number each
    saved = sum(4 * m.scale.size for m in model.modules() if isinstance(m, PackedLinear))
    needed = needed_bytes(open_checkpoint(folder), dtype)
    assert needed == total + (saved if dtype is None else 0)
    save_model(tmp_path / "again", model)
    again = load_model(tmp_path / "again")
    assert again.config == model.config
    assert mx.array_equal(logits(again), logits(model))


@pytest.mark.parametrize("value", [23, "bitnet", [1]], ids=str)
def test_second_description_must_be_an_object(tmp_path: Path, value: Any) -> None:
    folder = write(tmp_path / "m", tied=False)
    edit_json(folder / "config.json", quantization_config=value)
    with pytest.raises(CheckpointError, match="'quantization_config' must be an object"):
        load_model(folder)


@pytest.mark.parametrize("bits", [1, 2])
def test_checkpoint_of_mlx_lm(tmp_path: Path, bits: int) -> None:
    from mlx_lm.models import qwen3

    mx.random.seed(2)
    theirs = qwen3.Model(qwen3.ModelArgs(**_known(CONFIG), tie_word_embeddings=False))
    theirs.update(nn.utils.tree_map(_made_ternary, theirs.parameters()))
    nn.quantize(theirs, group_size=GROUP, bits=bits)
    (tmp_path / "m").mkdir()
    tensors = dict(tree_flatten(theirs.parameters()))
    mx.save_safetensors(str(tmp_path / "m" / "model.safetensors"), tensors)
    config = CONFIG | {"tie_word_embeddings": False, "rope_scaling": None}
    config |= {"quantization": {"group_size": GROUP, "bits": bits, "mode": "affine"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    want = theirs(TOKENS)
    assert relative_error(logits(load_model(tmp_path / "m")), want) <= TOLERANCE[mx.float32]


def _known(config: dict[str, Any]) -> dict[str, Any]:
    absent = {"hidden_act", "attention_bias", "use_sliding_window", "sliding_window"}
    return {key: value for key, value in config.items() if key not in absent}


def _made_ternary(array: mx.array) -> mx.array:
    return ternary_groups(array) if array.ndim == 2 else array


def test_dense_qwen3_saves_and_loads(tmp_path: Path) -> None:
    model = tiny_transformer("qwen3", linears=None)
    save_model(tmp_path / "m", model)
    assert mx.array_equal(logits(load_model(tmp_path / "m")), logits(model))


class TestRefused:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path / "m", tied=False)

    @pytest.mark.parametrize(
        "format",
        [
            {"group_size": 128, "bits": 7},
            {"group_size": 128, "bits": True},
            {"group_size": 16, "bits": 2},
            {"group_size": 128, "bits": 2, "mode": "mxfp4"},
            {"group_size": 128, "bits": 2, "model.embed_tokens": {"bits": 4}},
            "affine",
            {},
        ],
        ids=str,
    )
    def test_other_variants(self, folder: Path, format: Any) -> None:
        edit_json(folder / "config.json", quantization=format)
        with pytest.raises(UnsupportedModelError, match="'quantization' must be affine with 1, "):
            load_model(folder)

    @pytest.mark.parametrize("key", ["hadamard_block_size", "rotation", "Walsh"])
    @pytest.mark.parametrize("is_nested", [False, True])
    def test_rotated_weights(self, folder: Path, key: str, is_nested: bool) -> None:
        format = {"group_size": GROUP, "bits": 2, key: 512}
        edit_json(folder / "config.json", **({"quantization": format} if is_nested else {key: 512}))
        with pytest.raises(UnsupportedModelError, match="without the rotation the model would"):
            load_model(folder)

    @pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_next"])
    def test_kindred_architectures(self, folder: Path, model_type: str) -> None:
        edit_json(folder / "config.json", model_type=model_type)
        with pytest.raises(UnsupportedModelError, match=f"but got '{model_type}'. This arch"):
            load_model(folder)

    def test_windows(self, folder: Path) -> None:
        edit_json(folder / "config.json", use_sliding_window=True)
        with pytest.raises(UnsupportedModelError, match="'use_sliding_window' must be False"):
            load_model(folder)

    def test_group_that_does_not_fit(self, folder: Path) -> None:
        edit_json(folder / "config.json", hidden_size=96)
        with pytest.raises(CheckpointError, match="'group_size' must divide the 96 inputs"):
            load_model(folder)

    def test_float_format(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="must hold float master weights to be trained"):
            load_model(folder, packed=False)

    def test_biases_of_another_type(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        biases = mx.load(str(file))["model.embed_tokens.biases"]
        edit_tensors(file, model__embed_tokens__biases=biases.astype(mx.float16))
        with pytest.raises(CheckpointError, match=r"embed_tokens\.biases' .*must be float32, as"):
            load_model(folder)

    def test_missing_part(self, folder: Path) -> None:
        edit_tensors(folder / "model.safetensors", lm_head__biases=None)
        with pytest.raises(CheckpointError, match=r"lacks tensors .*'lm_head\.biases'"):
            load_model(folder)
