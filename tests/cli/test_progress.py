"""Where stderr is no terminal, long work prints a line at times."""

from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.hub.remote import cache_content
from mlx_mmfree.hub.remote.cache_content import RemoteFile
from mlx_mmfree.platform import progress
from tests.cli.test_lora import QUICK, _flags, data  # noqa: F401
from tests.training.conftest import config, run_values, without_curve  # noqa: F401
from tests.training.test_ternarize import dense, flags_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("without_curve")


@pytest.fixture(autouse=True)
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0)


def lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(words) == 0
    return [line for line in capsys.readouterr().err.splitlines() if " elapsed, " in line]


def test_train(config: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    shown = lines(["train", "--config", str(config)], capsys)
    last = [line for line in shown if line.startswith("training: ")][-1]
    assert last.startswith("training: 100 % (") and ", loss " in last


def test_lora(folder: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    shown = lines(["lora", *_flags(folder, data), *QUICK, "--train"], capsys)
    assert any(line.startswith("training: 50 % (2 of 4), ") for line in shown)


def test_ternarize(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    shown = lines(flags_of(dense), capsys)
    assert any(line.startswith("training: 50 % (3 of 6), ") for line in shown)


def test_tokenize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("One day.\n<|endoftext|>\nThe end.\n")
    words = ["tokenize", "--data", str(text), "--output", str(tmp_path / "out"), "--processes", "1"]
    assert any(line.startswith("tokenizing: 100 % (") for line in lines(words, capsys))


def test_convert(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", "--model", str(folder), "--output", str(tmp_path / "out")]
    assert any(line.startswith("writing: ") for line in lines(words, capsys))


def test_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [RemoteFile(name, "", 50, name, tmp_path / name) for name in "ab"]
    monkeypatch.setattr(cache_content, "_missing_files", lambda *_: files)
    monkeypatch.setattr(cache_content, "_fetch", lambda file, update: update(file.nbytes))
    cache_content.fetch_missing(lambda: None, "owner/name", None)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("downloading 2 files: 100 % (100 of 100), ")
