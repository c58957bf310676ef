"""`mmfree show`: maps of a text, ternary weights, and the tree of parts."""

import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli.parts import picture_flag
from mlx_mmfree.cli.show import main
from mlx_mmfree.hub import save_model
from mlx_mmfree.hub.checkpoint import load
from mlx_mmfree.models import find
from tests.hub.checkpoints import tiny_checkpoint
from tests.hub.marian_folder import SENTENCES, marian_folder

Captured = pytest.CaptureFixture[str]
PROMPT = "The cat\nsat on $1 日"


def _folder(folder: Path, **options: object) -> str:
    architecture = find("metaformer")
    mx.random.seed(5)
    config = {**architecture.tiny, "vocab_size": 2048, **options}
    model = architecture.build(architecture.config.from_hub(config))
    save_model(folder, model, demo.path())
    return str(folder)


def _refused(capsys: Captured, *flags: str) -> str:
    assert main(list(flags)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_something_must_be_named(capsys: Captured) -> None:
    assert "must be one of attention, weights, model" in _refused(capsys)
    assert "invalid choice: 'colours'" in _refused(capsys, "colours")


def test_model(capsys: Captured) -> None:
    assert main(["model"]) == 0
    head, total, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["part", "kind", "shape", "parameters", "bits", "size"]
    assert total.split()[:3] == ["model", "HGRNBit", "9,259,776"]
    assert any(line.startswith("├─ blocks.0 to 3, each") for line in lines)
    assert main(["model", "--json", "--dtype", "float16"]) == 0
    parts = {part["path"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert parts[""]["parameters"] == 9_259_776 and parts["embed"]["bits"] == 16
    assert parts["blocks.0.token_mixer.input_proj"]["shape"] == [384, 384]


def test_weights(tmp_path: Path, capsys: Captured) -> None:
    masters = str(tiny_checkpoint(tmp_path / "masters"))
    assert main(["weights", "--model", masters]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["matrix", "shape", "-1", "0", "+1", "scale"]
    assert main(["weights", "--model", masters, "--json"]) == 0
    matrices = json.loads(capsys.readouterr().out)["matrices"]
    assert [each["path"] for each in matrices] == [line.split()[0] for line in lines]
    rows, columns = matrices[0]["shape"]
    assert sum(matrices[0]["counts"]) == rows * columns


def test_dense_weights_are_refused(tmp_path: Path, capsys: Captured) -> None:
    dense = str(tiny_checkpoint(tmp_path / "dense", linear_class="dense"))
    error = _refused(capsys, "weights", "--model", dense)
    assert "--model must have ternary matrices but" in error


def test_without_matplotlib(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_flag, "find_spec", lambda name: None)
    for flags in (("attention", "--prompt", "a"), ("weights",)):
        error = _refused(capsys, *flags, "--picture", str(tmp_path / "a.png"))
        assert "--picture needs the package matplotlib" in error


@pytest.mark.plot
def test_a_model_that_reads_no_texts(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(nn.Linear):
        pipeline = "image-classification"

    other = SimpleNamespace(model=Other(2, 2), nbytes=0)
    monkeypatch.setattr(load, "OpenedModel", lambda *given, **named: other)
    picture = str(tmp_path / "a.png")
    error = _refused(capsys, "attention", "--prompt", "a", "--picture", picture)
    assert "--model must read texts but 'demo' is a Other." in error


@pytest.mark.plot
def test_picture_of_weights(tmp_path: Path, capsys: Captured) -> None:
    picture = tmp_path / "weights.png"
    assert main(["weights", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.plot
def test_attention(tmp_path: Path, capsys: Captured) -> None:
    picture = tmp_path / "maps.png"
    flags = ["attention", "--picture", str(picture), "--prompt"]
    assert main([*flags, PROMPT]) == 0
    assert capsys.readouterr().out == f"Drawn: 4 mixers into {picture}.\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*flags, PROMPT, "--layers", "1,3", "--max-tokens", "2"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("The first 2 of ") and last == f"Drawn: 2 mixers into {picture}."


@pytest.mark.plot
def test_what_is_left_out_is_reported(tmp_path: Path, capsys: Captured) -> None:
    gqa = {"name": "gqa", "num_heads": 16}
    model = _folder(tmp_path / "model", token_mixer=[gqa], num_hidden_layers=8)
    flags = ["attention", "--model", model, "--picture", str(tmp_path / "a.png"), "--prompt", "a b"]
    assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "They are of the first 6 of 8 layers; --layers takes others.",
        "They have the first 8 of 16 heads; --heads takes others.",
    ]
    error = _refused(capsys, *flags, "--layers", "0-8")
    assert "--layers must be numbers from 0 to 7 for this model but got 8" in error
    assert main([*flags, "--heads", "16"]) == 2
    out, error = capsys.readouterr()
    assert "layer 0: has 16 heads, none of them chosen." in out
    assert "--layers and --heads must name some" in error
    error = _refused(capsys, *flags, "--target", "b")
    assert "--target must be left out for a model that reads one text" in error
    missing = str(tmp_path / "none" / "a.png")
    assert "--picture must be a file" in _refused(capsys, *flags, "--picture", missing)
    assert "--prompt must hold a token" in _refused(capsys, *flags[:-1], "")
    error = _refused(capsys, *flags, "--max-tokens", "257")
    assert "--max-tokens must be at most 256 but got 257" in error


@pytest.mark.plot
def test_a_mixer_without_weights_is_named(tmp_path: Path, capsys: Captured) -> None:
    model = _folder(tmp_path / "model", token_mixer=["mlp_mixer", "pooling"], task="masked_lm")
    picture = ["--picture", str(tmp_path / "a.png")]
    assert main(["attention", "--model", model, "--prompt", "a b", *picture]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layer 0: [MLPMixer] has no weights between positions")
    assert lines[-1].startswith("Drawn: 1 mixers")


@pytest.mark.plot
def test_an_encoder_decoder(tmp_path: Path, capsys: Captured) -> None:
    model = str(marian_folder(tmp_path / "marian"))
    flags = ["attention", "--model", model, "--picture", str(tmp_path / "a.png")]
    assert main([*flags, "--prompt", SENTENCES[0]]) == 0
    alone = capsys.readouterr().out
    assert main([*flags, "--prompt", SENTENCES[0], "--target", SENTENCES[1]]) == 0
    both = capsys.readouterr().out
    assert int(both.split()[1]) > int(alone.split()[1])
