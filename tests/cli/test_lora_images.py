"""`mmfree lora` on image models: adapters and whole models, from labelled images."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image

from mlx_mmfree import load
from mlx_mmfree.cli.classify import main as classify
from mlx_mmfree.cli.fuse import main as fuse
from mlx_mmfree.cli.lora import main
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.layers.norms import running_statistics
from mlx_mmfree.models import architectures, find_described
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.trainer import Trainer
from tests.hub.timm_models import write_backbone

pytestmark = pytest.mark.usefixtures("without_curve")
QUICK = ["--iters", "12", "--batch-size", "6", "--steps-per-report", "1", "--steps-per-eval", "3"]
QUICK += ["--save-every", "3", "--learning-rate", "2e-3", "--scale", "2"]


@pytest.fixture
def without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mmfree.training.trainer.plot_run", lambda *_: True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Images that are bright, dark, or half of each."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, (name, count) in enumerate((("train", 24), ("valid", 9), ("test", 9))):
        labels = np.arange(count) % 3
        images = np.random.default_rng(seed).integers(0, 60, (count, 32, 32), np.uint8)
        images[labels == 0] += 150
        images[labels == 2, :16] += 150
        np.savez(folder / f"{name}.npz", images=images, labels=labels)
    return folder


def _model(folder: Path, name: str, *, is_ternary: bool = False) -> Path:
    described = {**architectures()[name].tiny, "num_classes": 3}
    described["pretrained_cfg"] = {"input_size": [3, 32, 32], "crop_pct": 1.0}
    if is_ternary:
        described["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        }
    architecture = find_described(described)
    mx.random.seed(3)
    save_model(folder / "model", architecture.build(architecture.config.from_hub(described)))
    return folder / "model"


def _flags(model: Path, data: Path, run: str = "run") -> list[str]:
    return ["--model", str(model), "--data", str(data), "--adapter-path", str(data.parent / run)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_ternary", [False, True], ids=["dense", "ternary"])
def test_an_adapter_learns_and_is_read_again(
    data: Path, is_ternary: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _model(data.parent, "swiftformer", is_ternary=is_ternary)
    flags = [*_flags(folder, data), *QUICK, "--keys", "*", "--learning-rate", "3e-4"]
    assert main([*flags, "--train", "--test"]) == 0
    shown = capsys.readouterr().out
    assert "train: 24 images" in shown and "learned from 72 images" in shown
    assert "of the images are sorted rightly." in shown
    run = data.parent / "run"
    log = read_log(run / "log.jsonl")
    losses = [record["valid_loss"] for record in log if "valid_loss" in record]
    assert losses[-1] < losses[0]
    assert {"valid_accuracy"} <= {key for record in log for key in record}
    model = attach(load_model(folder), read_adapter(run)).eval()
    before = running_statistics(load_model(folder))
    # a frozen norm stays as it was published
    found = {name: array for name, array in tree_flatten(model.parameters()) if name in before}
    assert found and all(mx.array_equal(array, before[name]) for name, array in found.items())
    with np.load(data / "valid.npz") as arrays:
        pictures, labels = list(arrays["images"]), arrays["labels"]
    logits = model(load(folder)[1](pictures))
    file = data.parent / "bright.png"
    Image.fromarray(pictures[0]).save(file)
    assert classify(["--model", str(folder), "--adapter-path", str(run), "--json", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)["images"][0]["classes"]
    probabilities = sorted(mx.softmax(logits[0]).tolist(), reverse=True)
    assert [each["probability"] for each in shown] == pytest.approx(probabilities, rel=1e-4)
    want = -np.mean(np.array(mx.log(mx.softmax(logits, axis=-1)))[np.arange(9), labels])
    assert want == pytest.approx(min(losses), rel=1e-4)


def test_a_stopped_run_goes_on_to_the_same_bits(data: Path) -> None:
    folder = _model(data.parent, "vit")
    whole = [*_flags(folder, data, "whole"), *QUICK, "--train"]
    assert main(whole) == 0
    losses = [each["loss"] for each in read_log(data.parent / "whole/log.jsonl") if "loss" in each]
    # of smoothed targets it could not fall below the loss of equal chances
    assert losses[-1] < 0.9 * math.log(3)

    class Stop(Exception):
        pass

    def stop(self: object) -> None:
        save(self)
        raise Stop

    save = Trainer._save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save", stop)
        with pytest.raises(Stop):
            main([*_flags(folder, data), *QUICK, "--train"])
    assert main([*_flags(folder, data), *QUICK, "--train"]) == 0
    files = [data.parent / run / "adapters.safetensors" for run in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_masters_learn_with_quantisation_that_sets_in_slowly(data: Path) -> None:
    folder = _model(data.parent, "vit", is_ternary=True)
    flags = ["--fine-tune-type", "full", "--quantization-warmup", "3", "--train"]
    assert main([*_flags(folder, data), *QUICK, *flags]) == 0
    for name in ("model", "masters"):
        load_model(data.parent / "run" / name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mask-prompt"], "--mask-prompt must be left out for an image model"),
        (["--train-mode", "orpo"], "--train-mode must be left out for an image model"),
        (["--grad-checkpoint"], "--grad-checkpoint must be left out for an image model"),
    ],
)
def test_what_is_for_texts_is_refused(
    data: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _model(data.parent, "vit")
    assert main([*_flags(folder, data), "--train", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_classes_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_backbone("vit", data.parent / "backbone")
    assert main([*_flags(data.parent / "backbone", data), "--train"]) == 2
    assert "the model must have classes but its 'num_classes' is 0" in capsys.readouterr().err


def test_a_folder_without_images_is_refused(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _model(data.parent, "vit")
    (tmp_path / "none").mkdir()
    assert main([*_flags(folder, tmp_path / "none"), "--train"]) == 2
    assert "must be a folder with train, valid or test" in capsys.readouterr().err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("is_ternary", "format"), [(False, "dense"), (True, "ternary"), (True, "keep")]
)
def test_an_adapter_is_merged(
    data: Path, is_ternary: bool, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = _model(data.parent, "vit", is_ternary=is_ternary), data.parent / "run"
    assert main([*_flags(folder, data), *QUICK, "--train"]) == 0
    flags = ["--model", str(folder), "--adapter-path", str(run), "--data", str(data)]
    target = data.parent / "fused"
    assert fuse([*flags, "--save-path", str(target), "--format", format, "--dtype", "float32"]) == 0
    assert "nats an image" in capsys.readouterr().out
    model, processor = load(target)
    pictures = processor([np.zeros((40, 32), np.uint8)])
    if format in ("dense", "keep"):
        want = attach(load_model(folder), read_adapter(run)).eval()(pictures)
        assert mx.allclose(model(pictures), want, rtol=1e-4, atol=1e-5)
    if is_ternary:
        assert fuse([*flags, "--save-path", f"{target}2", "--format", "dense"]) == 2
        assert "makes all linears of its blocks ternary or none" in capsys.readouterr().err


def test_one_image_a_batch_is_too_few_for_a_batch_norm_that_learns(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _model(data.parent, "swiftformer")
    flags = [*_flags(folder, data), *QUICK, "--batch-size", "1", "--train"]
    assert main([*flags, "--fine-tune-type", "full"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ") and "Raise 'batch_size' so that each process" in message
    assert not list((data.parent / "run").glob("*"))
    # under adapters it keeps to its running statistics
    assert main([*flags, "--dry-run"]) == 0
