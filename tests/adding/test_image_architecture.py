"""An image architecture is one file: it is loaded, packed, written and converted without a tokenizer."""

from pathlib import Path

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
    assert sum(isinstance(module, PackedBitLinear) for module in packed.modules()) == 7
    assert mx.allclose(packed(IMAGES), want, atol=1e-4)


def test_it_is_written_and_converted(folder: Path, tmp_path: Path) -> None:
    want = load_model(folder)(IMAGES)
    save_model(tmp_path / "packed", load_model(folder))
    assert mx.array_equal(load_model(tmp_path / "packed")(IMAGES), want)
    target = tmp_path / "mlx"
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 0
    assert mx.allclose(load_model(target)(IMAGES), want, atol=1e-4)


@pytest.mark.parametrize("command", ["generate", "chat", "perplexity"])
def test_what_goes_on_with_a_text_is_refused(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"generate": ["-p", "The dog"], "perplexity": ["--text-file", f"{folder}/config.json"]}
    assert main([command, "--model", str(folder), *flags.get(command, [])]) == 2
    shown = capsys.readouterr().err
    assert "ImageClassifier is for sorting images into classes" in shown
    assert shown.count("\n") == 1
