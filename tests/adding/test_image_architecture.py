"""An image architecture is one file: it is loaded, packed, written and converted without a tokenizer."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.models import ImageClassifier, find

IMAGES = mx.random.normal((2, 8, 12, 1), key=mx.random.key(0))


@pytest.fixture(scope="module")
def folder(added: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with float masters."""
    architecture = find("see_classes")
    mx.random.seed(0)
    model = architecture.build(architecture.config.from_hub(architecture.tiny))
    folder = tmp_path_factory.mktemp("see_classes") / "model"
    save_model(folder, model)
    return folder


def test_it_is_loaded_and_packed(folder: Path) -> None:
    model = load_model(folder, packed=False)
    assert isinstance(model, ImageClassifier)
    want = model(IMAGES)
    assert want.shape == (2, 3)
    packed = load_model(folder)
    assert sum(isinstance(module, PackedBitLinear) for module in packed.modules()) == 8
    assert mx.allclose(packed(IMAGES), want, atol=1e-4)


def test_it_is_written_and_converted(folder: Path, tmp_path: Path) -> None:
    want = load_model(folder)(IMAGES)
    save_model(tmp_path / "packed", load_model(folder))
    assert mx.array_equal(load_model(tmp_path / "packed")(IMAGES), want)
    target = tmp_path / "mlx"
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 0
    assert mx.allclose(load_model(target)(IMAGES), want, atol=1e-4)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    tensors = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    return {name: array.shape for name, array in tensors.items()}


def test_convolutions_are_stored_as_in_published_files(folder: Path, tmp_path: Path) -> None:
    shapes = stored_shapes(folder)
    assert shapes["patches.weight"] == (32, 1, 4, 4)
    assert shapes["near.weight"] == (32, 1, 3, 3)
    assert shapes["mix.weight"] == (32, 32, 1, 1)
    for number, flags in enumerate(([], ["--to", "hf", "--keep-masters"])):
        target = tmp_path / str(number)
        source = ["--model", str(folder), "--mlx-path", str(target)]
        assert main(["convert", *source, *flags]) == 0
        written = stored_shapes(target)
        assert written["near.weight"] == shapes["near.weight"]
        assert written["mix.weight"] == shapes["mix.weight"]
    assert written["patches.weight"] == shapes["patches.weight"]


def test_a_stored_convolution_is_that_of_mlx(folder: Path) -> None:
    tensors = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    near = load_model(folder, packed=False).embed.near
    want = mx.conv2d(
        x := mx.random.normal((1, 5, 4, 32)),
        mx.moveaxis(tensors["near.weight"], 1, -1),
        padding=1,
        groups=32,
    )
    assert mx.allclose(near(x), want + tensors["near.bias"], atol=1e-5)


@pytest.mark.parametrize("command", ["generate", "chat", "perplexity"])
def test_what_goes_on_with_a_text_is_refused(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"generate": ["-p", "The dog"], "perplexity": ["--data", f"{folder}/config.json"]}
    assert main([command, "--model", str(folder), *flags.get(command, [])]) == 2
    shown = capsys.readouterr().err
    assert "ImageClassifier is for sorting images into classes" in shown
    assert shown.count("\n") == 1
