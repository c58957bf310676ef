"""`mmfree export`: its flags and what it says."""

import json
from pathlib import Path

import pytest

from mlx_mmfree.cli.export import main

Captured = pytest.CaptureFixture[str]


def test_what_is_written_and_said(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "out"
    assert (
        main(
            [
                "--model",
                str(folder),
                "--output",
                str(target),
                "--weights",
                "beside",
                "--context",
                "9",
            ]
        )
        == 0
    )
    shown = capsys.readouterr()
    described = json.loads((target / "step.json").read_text())
    assert {file.name for file in target.iterdir()} >= {
        "step.json",
        "step.mlxfn",
        "tokenizer.json",
        described["weights_file"],
    }
    assert "Operations: MLX's own, without kernels of this library." in shown.out
    assert "Capacity: any number of tokens" in shown.out
    assert " ".join(map(str, described["example"]["tokens"])) in shown.out
    assert "have no effect: --context" in shown.err
    assert main(["--model", str(folder), "--output", str(target), "--overwrite"]) == 0
    assert "weights.safetensors" not in capsys.readouterr().out


def test_attention_says_how_far_it_reaches(
    attention_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert (
        main(
            [
                "--model",
                str(attention_folder),
                "--output",
                str(tmp_path / "out"),
                "--context",
                "300",
            ]
        )
        == 0
    )
    assert "Capacity: 512 tokens" in capsys.readouterr().out


def test_the_packaged_model_is_the_default(tmp_path: Path, capsys: Captured) -> None:
    assert main(["--output", str(tmp_path / "out")]) == 0
    assert "step.mlxfn (5." in capsys.readouterr().out


def test_mistakes(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    for arguments, message in (
        (
            ["--model", str(folder), "--output", str(tmp_path / "full")],
            "must be a new or empty folder",
        ),
        (
            ["--model", str(folder), "--output", str(tmp_path / "full"), "--overwrite"],
            "must be a checkpoint folder",
        ),
        (
            ["--model", str(folder), "--output", str(folder / "out")],
            "must lie outside of what is read",
        ),
        (["--model", str(tmp_path / "none"), "--output", str(tmp_path / "out")], "none"),
        (
            ["--revision", "main", "--output", str(tmp_path / "out")],
            "--revision must come with --model",
        ),
    ):
        assert main(arguments) == 2
        found = capsys.readouterr().err
        assert message in found and found.count("\n") == 1
    assert not (tmp_path / "out").exists()
