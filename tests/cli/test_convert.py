"""`mmfree convert` on a small float checkpoint."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.generation import generate_tokens
from mlx_mmfree.hub import load, load_model, save_model
from tests.hub.checkpoints import edit_json, tiny_transformer

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.mark.parametrize("flag", ["--model", "--hf-path"])
def test_packed_form_is_smaller_and_generates_the_same(flag: str, tmp_path: Path) -> None:
    source, target = GOLDENS / "hgrn_default", tmp_path / "packed"
    assert convert(flag, source, "--mlx-path", target) == 0
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (source, target)]
    assert sizes[1] < sizes[0] / 2
    tokens = [
        list(generate_tokens(load_model(folder), [1, 2, 3], max_tokens=12))
        for folder in (source, target)
    ]
    assert tokens[0] == tokens[1]


def test_packed_checkpoint_is_converted_again_without_change(folder: Path, tmp_path: Path) -> None:
    assert convert("--model", folder, "--mlx-path", tmp_path / "again", "--dtype", "float16") == 0
    model, tokenizer = load(tmp_path / "again")
    original, _ = load(folder)
    assert model.embed.weight.dtype == mx.float16
    name = "input_proj"
    ours, theirs = (m.blocks[0].token_mixer[name].weight for m in (model, original))
    assert mx.array_equal(ours, theirs)
    assert tokenizer.encode("A dog", add_special_tokens=False)


def test_existing_folder_is_kept(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(folder, tmp_path / "target")
    before = {file: file.read_bytes() for file in target.iterdir()}
    assert convert("--model", folder, "--mlx-path", target) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in target.iterdir()} == before


def test_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert() == 2
    assert "--model/--hf-path" in capsys.readouterr().err


def test_masters_of_a_silent_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "masters"
    save_model(source, tiny_transformer())
    edit_json(source / "config.json", quantization_config=..., is_bitnet_config=True)
    assert convert("--model", source, "--mlx-path", tmp_path / "a") == 2
    assert "'latent' must be given" in capsys.readouterr().err
    for flag, is_ternary in [("--latent", True), ("--no-latent", False)]:
        target = tmp_path / flag
        assert convert("--model", source, "--mlx-path", target, flag) == 0
        assert (load_model(target).config.linears is not None) == is_ternary
