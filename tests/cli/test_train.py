"""`mmfree train` on a tiny corpus, from text files to a model that writes."""

from pathlib import Path

import pytest

from mlx_mmfree import load
from mlx_mmfree.cli.train import build_parser, main
from tests.training.conftest import config, run_values  # noqa: F401


def test_run_writes_a_model_that_loads(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "Best step" in out and "valid/bits_per_byte" in out
    run = config.parent / "run"
    model, tokenizer = load(run / "model")
    assert model.vocab_size == 300
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert main(["--config", str(config)]) == 0


def test_dense_linears_by_flag(config: Path) -> None:  # noqa: F811
    assert main(["--config", str(config), "--linear-class", "dense", "--output", "dense"]) == 0
    model, _ = load(config.parent / "dense/model")
    assert model.config.linear_class == "dense"


def test_flags_win_over_the_file(config: Path) -> None:  # noqa: F811
    assert main(["--config", str(config), "--steps", "3", "--warmup-steps", "1"]) == 0
    assert (config.parent / "run/log.jsonl").read_text().count('"learning_rate":') == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps must be positive but got 0"),
        (["--stepz", "3"], "unrecognized arguments: --stepz"),
        (["--learning-rate", "fast"], "invalid float value"),
    ],
)
def test_mistakes_are_one_line(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    assert main(["--config", str(config), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml' must be a readable YAML file" in capsys.readouterr().err


def test_every_flag_is_described() -> None:
    assert all(action.help for action in build_parser()._actions)
