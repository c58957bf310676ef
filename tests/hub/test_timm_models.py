"""Image models are timm's: from its files, to the same logits, and back to the same files.

So is Conv2Former, which timm does not have, with the code that belongs to its paper.
"""

import json
import shutil
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import load, load_model, save_model
from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter
from mlx_mmfree.images import ImageProcessor
from mlx_mmfree.layers.matrix import matrices, parameters
from mlx_mmfree.models import ImageClassifier, find_described
from mlx_mmfree.models.parts.architecture import layer_numbers, weight_names
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers
from tests.hub.timm_models import (
    CLASSIFIERS,
    DATA,
    FOLDERS,
    TINY,
    Case,
    images,
    logits,
    timm_model,
    write_backbone,
    write_folder,
)
from tests.tolerances import TOLERANCE

each_folder = pytest.mark.parametrize(("folder", "size"), FOLDERS.values(), ids=FOLDERS)


def relative_difference(got: mx.array, want: np.ndarray) -> float:
    return float(np.abs(np.array(got) - want).max() / np.abs(want).max())


def tensors(folder: Path) -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))


@pytest.mark.sample(2)
@each_folder
def test_arguments_that_change_nothing(folder: Path, size: tuple[int, int], tmp_path: Path) -> None:
    """Rates of dropout, which count in training alone, and the values that timm takes anyway."""
    shutil.copytree(folder, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    usual = find_described(config).config.usual
    rates = {"drop_rate": 0.1, "proj_drop_rate": 0.2, "attn_drop_rate": 0.1, "weight_init": "jax"}
    config["model_args"] = {**usual, **rates, **config.get("model_args", {})}
    file.write_text(json.dumps(config))
    want, got = (load_model(path)(mx.array(images(size))) for path in (folder, tmp_path / "m"))
    assert mx.array_equal(got, want)
    for key, value in [("drop_rate", 1.5), *((key, "other") for key in usual)]:
        wrong = {**config, "model_args": {**config["model_args"], key: value}}
        file.write_text(json.dumps(wrong))
        with pytest.raises((CheckpointError, UnsupportedModelError), match=f"'{key}' must be"):
            load_model(tmp_path / "m")


@each_folder
def test_logits_are_those_of_timm(folder: Path, size: tuple[int, int]) -> None:
    model, processor = load(folder)
    assert isinstance(model, ImageClassifier)
    assert isinstance(processor, ImageProcessor)
    want = np.load(folder / "logits.npy")
    assert relative_difference(model(mx.array(images(size))), want) < 1e-5
    prepared = processor([np.zeros((40, 30, 3), np.uint8)])
    assert model(prepared).shape == (1, want.shape[1])


@pytest.mark.sample(2)
@each_folder
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bits_are_kept(folder: Path, size: tuple[int, int], dtype: mx.Dtype) -> None:
    got = load_model(folder, dtype=dtype)(mx.array(images(size)).astype(dtype))
    assert got.dtype == dtype
    want = np.load(folder / "logits.npy")
    assert relative_difference(got.astype(mx.float32), want) < TOLERANCE[dtype]


@each_folder
def test_a_model_is_written_as_it_was_read(
    folder: Path, size: tuple[int, int], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    save_model(target, load_model(folder, packed=False))
    read, written = tensors(folder), tensors(target)
    assert written.keys() == read.keys()
    for key, value in read.items():
        assert written[key].dtype == value.dtype
        assert mx.array_equal(written[key], value), key
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, target))
    assert {key: after[key] for key in before} == before


@pytest.mark.sample(2)
@each_folder
def test_a_model_is_converted_without_a_change(
    folder: Path, size: tuple[int, int], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 0
    got = load_model(target)(mx.array(images(size)))
    assert relative_difference(got, np.load(folder / "logits.npy")) < 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_without_classes_gives_the_features_of_timm(name: str, tmp_path: Path) -> None:
    """The features of timm 1.0.31; for Conv2Former, which it lacks, the ones that give the logits."""
    folder, size = FOLDERS[name]
    backbone, saved, converted = (tmp_path / each for each in ("backbone", "saved", "converted"))
    write_backbone(name, backbone)
    save_model(saved, load_model(backbone, packed=False))
    assert main(["convert", "--model", str(backbone), "--mlx-path", str(converted)]) == 0
    for each in (backbone, saved, converted):
        got = load_model(each)(mx.array(images(size)))
        if name == "conv2former":
            head = tensors(folder)
            got = got @ head["pred.weight"].T + head["pred.bias"]
            assert relative_difference(got, np.load(folder / "logits.npy")) < 1e-5
        else:
            assert relative_difference(got, np.load(folder / "features.npy")) < 1e-5
        assert json.loads((each / "config.json").read_text())["num_classes"] == 0
        assert tensors(each).keys() == tensors(folder).keys() - CLASSIFIERS[name]


@pytest.mark.interop
@pytest.mark.parametrize(
    "case",
    [
        Case("vit_tiny_patch16_224", {}, (224, 224)),
        Case("deit_small_patch16_224", {"depth": 2}, (208, 240)),
        Case("mixer_s16_224", {"embed_dim": 512, "num_blocks": 8}, (224, 224)),
        Case("mixer_b16_224", {"embed_dim": 768, "num_blocks": 2}, (240, 208)),
        Case("gmlp_ti16_224", {"embed_dim": 128, "num_blocks": 30}, (224, 224)),
        Case("gmlp_s16_224", {"embed_dim": 256, "num_blocks": 2}, (208, 240)),
        Case("swin_tiny_patch4_window7_224", {}, (224, 224)),
        Case("swin_small_patch4_window7_224", {"depths": [2, 2, 2, 2]}, (250, 198)),
        Case("swin_base_patch4_window7_224", {"depths": [2, 2, 2, 2]}, (117, 330)),
        Case("edgenext_xx_small", {}, (256, 256)),
        Case("edgenext_x_small", {}, (151, 97)),
        Case("edgenext_small", {}, (256, 256)),
        Case("efficientvit_b0", {}, (224, 224)),
        Case("efficientvit_b1", {}, (151, 97)),
        Case("efficientvit_b2", {}, (224, 224)),
        Case("efficientvit_b3", {}, (288, 288)),
        Case("poolformer_s12", {}, (224, 224)),
        Case("poolformer_s24", {}, (151, 97)),
        Case("swiftformer_xs", {}, (224, 224)),
        Case("swiftformer_s", {}, (151, 97)),
        Case("swiftformer_l1", {}, (224, 224)),
        Case("swiftformer_l3", {}, (97, 151)),
    ],
    ids=lambda case: f"{case.architecture}-{case.size}",
)
def test_logits_of_larger_models_are_those_of_timm(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    model = timm_model(case)
    write_folder(tmp_path, case, model)
    pictures = images(case.size)
    got = load_model(tmp_path)(mx.array(pictures))
    assert relative_difference(got, logits(model, pictures)) < 1e-4


@pytest.mark.interop
@pytest.mark.parametrize("name", ["edgenext", "efficientvit", "swiftformer", "swin", "vit"])
def test_timm_reads_what_is_written(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    model = load_model(DATA / name, packed=False)
    save_model(tmp_path / "out", model)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    pictures = images(TINY[name].size)
    assert relative_difference(model(mx.array(pictures)), logits(theirs, pictures)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "resnet50"}, "'architecture' must be one of"),
        ({"model_args": {"num_heads": 3}}, "'num_heads' must divide 'embed_dim'"),
        ({"model_args": {"init_values": 1e-5}}, "'init_values' must be None but got 1e-05"),
        ({"model_args": {"other": 1e-5}}, "but got 'other'"),
        ({"model_args": {"img_size": [4, 4]}}, "'img_size' must be at least 'patch_size'"),
        ({"global_pool": "avg"}, "'global_pool' must be 'token'"),
        ({"num_classes": -1}, "'num_classes' must be a whole number from 0"),
        ({"num_classes": 0}, "unexpected tensors of this architecture: 2, namely 'head.bias'"),
        ({"label_names": ["a"]}, "'label_names' must be a list of 5 names"),
        ({"pretrained_cfg": {"input_size": [3, 8]}}, "'input_size' must be a list of channels"),
        ({"token_mixer": "gla"}, "must be bidirectional but gla"),
        ({"num_classes": 6}, "must have shape"),
    ],
)
def test_a_wrong_description_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = json.loads((DATA / "vit" / "config.json").read_text())
    if isinstance(added := change.get("model_args"), dict):
        change = {**change, "model_args": {**config["model_args"], **added}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    shutil.copy(DATA / "vit" / "model.safetensors", tmp_path)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_model(tmp_path)


@pytest.mark.exhaustive
@each_folder
@pytest.mark.parametrize("flags", [[], ["--to", "hf", "--keep-masters"]], ids=["mlx", "hf"])
def test_a_model_is_made_ternary(
    folder: Path, size: tuple[int, int], flags: list[str], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    source = ["--model", str(folder), "--mlx-path", str(target)]
    assert main(["convert", *source, "--ternarize", *flags]) == 0
    model = load_model(target)
    ternary = [path for path, matrix in matrices(model).items() if matrix.is_ternary]
    assert ternary
    assert all("blocks" in path for path in ternary)
    pictures = mx.array(images(size))
    trained = load_model(target, packed=False, rebuild_masters=True)
    # a sum between two 8-bit codes may be rounded either way
    assert relative_difference(model(pictures), np.array(trained(pictures))) < 1 / 127


@pytest.mark.sample(2)
@each_folder
def test_an_adapter_of_the_last_layer_is_written_and_read(
    folder: Path, size: tuple[int, int], tmp_path: Path
) -> None:
    model = load_model(folder, packed=False)
    pictures = mx.array(images(size))
    without = np.array(model(pictures))
    layers = adapt_layers(model, num_layers=1, rank=2)
    names = weight_names(model.config)
    numbers = {location[0] for layer in layers if (location := names.in_layer(layer))}
    assert numbers == {max(layer_numbers(model, names))}
    for path in parameters(model):
        if path.endswith("lora_b"):
            module, key = path.rsplit(".", 1)
            dict(model.named_modules())[module][key] = mx.random.normal(
                parameters(model)[path].shape, key=mx.random.key(1)
            )
    want = np.array(model(pictures))
    assert relative_difference(mx.array(want), without) > 1e-3
    write_adapter(tmp_path / "adapter", model, {})
    again = attach(load_model(folder), read_adapter(tmp_path / "adapter")).eval()
    assert relative_difference(again(pictures), want) < 1e-5


@pytest.mark.interop
def test_images_of_another_size_are_read_as_by_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    case = Case("deit_tiny_patch16_224", {"depth": 2}, (80, 48))
    theirs = timm_model(case)
    write_folder(tmp_path, case, theirs)
    model = load_model(tmp_path)
    dynamic = timm.create_model(
        case.architecture, num_classes=5, depth=2, img_size=case.size, dynamic_img_size=True
    ).eval()
    dynamic.load_state_dict(theirs.state_dict())
    for size in ((48, 96), (160, 32), (80, 48)):
        pictures = images(size)
        assert relative_difference(model(mx.array(pictures)), logits(dynamic, pictures)) < 1e-4
