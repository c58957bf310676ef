"""Rotated weights are rotated back in each product, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.hub import load_model, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.parameter_reader import ParameterReader
from mlx_mmfree.hub.conversion.convert import convert
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.conversion.verify import verify
from mlx_mmfree.hub.publish.runtimes import opening
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.rotated import RotatedEmbedding, RotatedLinear
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
SCHEMA1, SCHEMA2 = GOLDENS / "prism_schema1", GOLDENS / "prism_schema2"
DOWN = "model.layers.0.mlp.down_proj"


def copied(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    folder.chmod(0o755)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change) -> None:
    tensors = mx.load(str(folder / "model.safetensors"))
    change(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("disguised", "holds signs of a rotation"),
        ("sign_zero", "signs .* must be 1 or -1 but number 7 is 0.0"),
        ("signs_missing", "signs of the rotated .*down_proj.* are missing"),
    ],
)
def test_published_cases_are_refused_for_their_rotation(name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_model(GOLDENS / f"refuse_prism_{name}")


def set_block(folder: Path, block: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for each in config["modules"]:
        if each["path"] == DOWN:
            each["block"] = block
    change_config(folder, modules=config["modules"])


@pytest.mark.parametrize("block", [-1, 3, 1, 2**14, 1.0, None, "512", True])
def test_blocks_that_are_none_are_refused(tmp_path: Path, block: object) -> None:
    folder = copied(SCHEMA2, tmp_path / "model")
    set_block(folder, block)
    with pytest.raises(UnsupportedModelError, match=r"'block' of the rotated"):
        load_model(folder)


def test_a_block_must_divide_the_inputs(tmp_path: Path) -> None:
    folder = copied(SCHEMA2, tmp_path / "model")
    set_block(folder, 1024)
    with pytest.raises(CheckpointError, match=r"'block' of the rotated .* must divide its 512"):
        load_model(folder)


def test_left_over_signs_are_refused(tmp_path: Path) -> None:
    folder = copied(SCHEMA2, tmp_path / "model")
    set_block(folder, 0)
    with pytest.raises(CheckpointError, match="has no rotation for it, but there are signs"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 3}, "'schema_version'"),
        ({"schema_version": True}, "'schema_version'"),
        ({"tensor_namespace": "mlx-lm-text"}, "'tensor_namespace'"),
        ({"gdn_activation_layout": "tiled"}, "'gdn_activation_layout'"),
        ({"gdn_activation_layout": None}, "'gdn_activation_layout'"),
        ({"quantization": {"bits": 4, "group_size": 128, "mode": "affine"}}, "'quantization'"),
        ({"modules": []}, "'modules'"),
        ({"modules": None}, "'modules'"),
        ({"modules": {}}, "'modules'"),
        ({"modules": [{"block": 0}]}, "'path' of its own"),
        ({"modules": [{"path": "a", "block": 0, "embedding": False}] * 2}, "'path' of its own"),
        ({"modules": [{"path": "a", "block": 0, "embedding": False}]}, "a linear or an embedding"),
        ({"modules": [{"path": "lm_head", "block": 0, "embedding": True}]}, "'embedding' of"),
        ({"modules": [{"path": "lm_head", "block": 0, "embedding": 1}]}, "an 'embedding'"),
        (
            {"modules": [{"path": "lm_head", "block": 0, "embedding": False, "dtype": "float32"}]},
            "'dtype' float16",
        ),
    ],
)
def test_unknown_descriptions_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = copied(SCHEMA2, tmp_path / "model")
    change_config(folder, **change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        load_model(folder)


def test_short_signs_are_refused(tmp_path: Path) -> None:
    folder = copied(SCHEMA2, tmp_path / "model")
    name = f"language_model.{DOWN}.signs"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    with pytest.raises(CheckpointError, match=r"signs .* must be 512, one for each input"):
        load_model(folder)


@pytest.mark.parametrize("value", [0.0, 2.0, -3.0, float("nan"), float("inf")])
def test_other_signs_are_refused(tmp_path: Path, value: float) -> None:
    folder = copied(SCHEMA2, tmp_path / "model")
    name = f"language_model.{DOWN}.signs"

    def change(tensors: dict[str, mx.array]) -> None:
        signs = tensors[name]
        signs[3] = value
        tensors[name] = signs

    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=r"signs .* must be 1 or -1 but number 3 is"):
        load_model(folder)


def test_rotated_layers_equal_their_matrix() -> None:
    model = load_model(SCHEMA1, dtype=mx.float32)
    rotated = {
        path: each for path, each in matrices(model).items() if isinstance(each, RotatedLinear)
    }
    assert len(rotated) > 5 and isinstance(rotated["embed"], RotatedEmbedding)
    for path, layer in rotated.items():
        matrix = layer.written_out(dict(layer.items()))
        x = mx.random.normal((3, layer.input_dims))
        want = x @ matrix.T
        assert relative_error(layer.multiply(x), want) <= TOLERANCE[mx.float32], path
        if layer.is_embedding:
            assert relative_error(layer(mx.array([0, 2])), matrix[mx.array([0, 2])]) <= 1e-5
            assert relative_error(layer.as_linear(x), want) <= TOLERANCE[mx.float32]
        else:
            assert relative_error(layer(x), want) <= TOLERANCE[mx.float32], path


@pytest.mark.parametrize("source", [SCHEMA1, SCHEMA2], ids=["1", "2"])
def test_saved_models_keep_their_rotation(tmp_path: Path, source: Path) -> None:
    model = load_model(source)
    save_model(tmp_path / "saved", model)
    again = load_model(tmp_path / "saved")
    tokens = mx.array([[1, 5, 9, 2]])
    assert mx.array_equal(model(tokens)[0], again(tokens)[0])
    kinds = {type(each) for each in matrices(again).values()}
    assert RotatedLinear in kinds


TOKENS = mx.array([[1, 5, 9, 2, 7, 3]])


def rotated_of(folder: Path) -> dict[str, RotatedLinear]:
    layers = matrices(load_model(folder)).items()
    return {path: each for path, each in layers if isinstance(each, RotatedLinear)}


@pytest.mark.parametrize("source", [SCHEMA1, SCHEMA2], ids=["1", "2"])
def test_a_conversion_keeps_the_rotation(tmp_path: Path, source: Path) -> None:
    report = convert(open_checkpoint(str(source)), tmp_path / "m")
    assert report.is_lossless and report.logits_difference == 0.0
    assert rotated_of(tmp_path / "m").keys() == rotated_of(source).keys()
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["model_type"] == "prism_hadamard_qwen35" and config["schema_version"] == 1
    saved = tmp_path / "saved"
    save_model(saved, load_model(tmp_path / "m"))
    # what lies as on the Hub is written as mlx-lm has it
    convert(open_checkpoint(str(saved)), tmp_path / "again")
    want, got = (
        load_model(each, dtype=mx.float32)(TOKENS)[0] for each in (source, tmp_path / "again")
    )
    assert relative_error(got, want) <= TOLERANCE[mx.float32]


def flip_a_sign(tensors: dict[str, mx.array]) -> None:
    tensors[f"{DOWN}.signs"] = tensors[f"{DOWN}.signs"] * mx.where(mx.arange(512) == 9, -1.0, 1.0)


def change_a_code(tensors: dict[str, mx.array]) -> None:
    words = tensors[f"{DOWN}.weight"]
    words[0, 0] = words[0, 0] ^ 1
    tensors[f"{DOWN}.weight"] = words


def change_a_scale(tensors: dict[str, mx.array]) -> None:
    scales = tensors[f"{DOWN}.scales"]
    scales[0, 0] = scales[0, 0] * 2
    tensors[f"{DOWN}.scales"] = scales


def swap_two_signs(tensors: dict[str, mx.array]) -> None:
    signs = tensors[f"{DOWN}.signs"]
    first = mx.argmax(signs).item(), mx.argmin(signs).item()
    signs[first[0]], signs[first[1]] = -1.0, 1.0
    tensors[f"{DOWN}.signs"] = signs


def add_one_twice(tensors: dict[str, mx.array]) -> None:
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name] + 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "damage", [flip_a_sign, change_a_code, change_a_scale, swap_two_signs, add_one_twice]
)
def test_damage_is_found(tmp_path: Path, damage: Any) -> None:
    source = ParameterReader(open_checkpoint(str(SCHEMA2)))
    convert(open_checkpoint(str(SCHEMA2)), tmp_path / "m", check=False)
    written = tmp_path / "m"
    verify(source, ParameterReader(open_checkpoint(str(written))), FloatFormats())
    change_tensors(written, damage)
    with pytest.raises(CheckpointError, match=r"\[verify\] tensor"):
        verify(source, ParameterReader(open_checkpoint(str(written))), FloatFormats())


@pytest.mark.parametrize(("unrotate", "error"), [("dense", 3e-3), (8, 5e-2)])
def test_a_twin_has_no_rotation(tmp_path: Path, unrotate: Any, error: float) -> None:
    target = tmp_path / "m"
    report = convert(open_checkpoint(str(SCHEMA1)), target, formats=FloatFormats(unrotate=unrotate))
    assert not rotated_of(target) and report.logits_difference < error
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == "qwen3_5" and "modules" not in config
    assert report.total.target_bytes > 2 * report.total.source_bytes


def test_formats_that_mlx_lm_does_not_rotate_are_refused(tmp_path: Path) -> None:
    file = GOLDENS / "gguf_qwen35_pq2_0_rotated" / "model.gguf"
    with pytest.raises(UnsupportedModelError, match=r"blocks from 512 to 8192, for mlx-lm"):
        convert(open_checkpoint(str(file)), tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="'unrotate' must be dense for transformers"):
        convert(
            open_checkpoint(str(SCHEMA1)), tmp_path / "m", to="hf", formats=FloatFormats(unrotate=8)
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["prism_schema1", "mlx_qwen35_2bit_g128", "gguf_qwen35_pq2_0_rotated/model.gguf"]
)
def test_the_layout_of_the_hub_keeps_the_gains_of_norms(tmp_path: Path, name: str) -> None:
    """The gain less 1 takes more bits than the gain, so that it is written in float32."""
    source = open_checkpoint(str(GOLDENS / name))
    report = convert(source, tmp_path / "m", to="hf")
    tensors = mx.load(str(tmp_path / "m" / "model.safetensors"))
    [gain] = [tensors[key] for key in tensors if key.endswith("layers.0.input_layernorm.weight")]
    assert gain.dtype == mx.float32 and abs(mx.mean(gain).item()) < 0.5
    # without the rotation, weights are rounded to 16 bits
    assert report.logits_difference < TOLERANCE[mx.float16]
    in_transformers = opening(report.openings, "transformers")
    assert in_transformers is not None and in_transformers.opens
    assert not ParameterReader(source).lies_as_on_hub


@pytest.mark.interop
@pytest.mark.usefixtures("unfused")  # mlx-lm lets MLX fuse its operations
@pytest.mark.parametrize("name", ["prism_schema1", "prism_schema2", "mlx_qwen35_2bit_g128"])
def test_stock_mlx_lm_computes_the_same(tmp_path: Path, name: str) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    convert(open_checkpoint(str(GOLDENS / name)), tmp_path / "m")
    golden = mx.load(str(GOLDENS / name / "golden.safetensors"))
    model, _ = load_with_mlx_lm(tmp_path / "m")
    want = golden["logits_lowp"] if "logits_lowp" in golden else golden["logits"]
    assert relative_error(model(golden["input_ids"]), want) <= TOLERANCE[mx.float16]


def test_adapters_of_rotated_layers_have_the_gradients_of_the_matrix(tmp_path: Path) -> None:
    twin = tmp_path / "m"
    convert(open_checkpoint(str(SCHEMA1)), twin, formats=FloatFormats(mx.float32, unrotate="dense"))
    found = {}
    for name, folder in (("rotated", SCHEMA1), ("dense", twin)):
        model = load_model(folder, dtype=mx.float32)
        plain = model(TOKENS)[0]
        model.freeze()
        names = sorted(add_adapters(model, in_the_blocks, kind="lora", rank=4, scale=1.0))
        modules = dict(model.named_modules())
        for number, path in enumerate(names):
            drawn, key = modules[path].lora_a, mx.random.key(number)
            modules[path].lora_a = mx.random.normal(drawn.shape, key=key)
        assert mx.array_equal(model(TOKENS)[0], plain)

        def loss(model: Any) -> mx.array:
            logits = model(TOKENS)[0][:, :-1]
            return nn.losses.cross_entropy(logits, TOKENS[:, 1:], reduction="mean")

        _, gradients = nn.value_and_grad(model, loss)(model)
        found[name] = names, dict(tree_flatten(gradients))
    assert found["rotated"][0] == found["dense"][0] and len(found["dense"][0]) > 8
    rotated, dense = (each for _, each in found.values())
    assert rotated.keys() == dense.keys()
    for name, gradient in rotated.items():
        # what is drawn has none while the other factor is zero
        assert gradient.any().item() == name.endswith("lora_b")
        assert relative_error(gradient, dense[name]) <= GRADIENT_TOLERANCE, name


def in_the_blocks(path: str, module: Any) -> bool:
    return path.startswith("blocks.")
