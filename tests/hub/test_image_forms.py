"""Formats of image models that commands write, show and publish, and those that they refuse."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.cli.convert import main as convert
from mlx_mmfree.cli.show import main as show
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.publish.upload import plan_upload
from mlx_mmfree.models import architectures, find_described
from tests.tolerances import relative_error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("images") / "tiny"
    save_model(target, _model())
    return target


def _model() -> Any:
    mx.random.seed(1)
    described = {**architectures()["vit"].tiny, "num_classes": 3, "label_names": ["a", "b", "c"]}
    architecture = find_described(described)
    return architecture.build(architecture.config.from_hub(described))


def _convert(folder: Path, target: Path, *flags: str) -> int:
    return convert(["--model", str(folder), "--mlx-path", str(target), *flags])


def test_a_head_with_a_bias_is_quantised(folder: Path, tmp_path: Path) -> None:
    assert _convert(folder, tmp_path / "out", "--head-bits", "8") == 0
    images = mx.random.normal((2, 32, 32, 3))
    got, want = (load_model(path)(images) for path in (tmp_path / "out", folder))
    assert 0 < relative_error(got, want) < 0.05


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--embed-bits", "8"), "it has no embedding. Leave it out"),
        (("--to", "gguf"), "this library does not write as GGUF"),
        (("--ternarize", "group"), "128 does not divide the 32 inputs"),
        (("--ternarize", "--to", "hf"), "--keep-masters must be given for 'model_type' 'vit'"),
    ],
)
def test_formats_that_do_not_exist_are_refused(
    folder: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _convert(folder, tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_ternary_model_is_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _convert(folder, tmp_path / "out", "--ternarize") == 0
    capsys.readouterr()
    assert show(["weights", "--model", str(tmp_path / "out")]) == 0
    assert "stages.0.blocks.1.mixer.qkv_proj" in capsys.readouterr().out
    assert show(["model", "--model", str(tmp_path / "out")]) == 0
    assert "PackedBitLinear" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card


def test_the_card_says_how_images_are_sorted(folder: Path) -> None:
    card = plan_upload(folder, "me/tiny").card
    assert card is not None
    assert "pipeline_tag: image-classification" in card and "library_name: mlx_mmfree" in card
    assert 'model, processor = load("me/tiny")' in card and "generate" not in card
