"""Damaged tokenizer files give a clean error or a tokenizer that works."""

import time
from pathlib import Path

import pytest

from .mutations import exercise, mutate

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


@pytest.mark.parametrize("name", ["tokenizer_spm", "tokenizer_bpe"])
def test_damaged_files(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = 0
    for seed in range(60):
        what = mutate(GOLDENS / name, tmp_path / "copy", seed)
        started = time.monotonic()
        try:
            loaded += exercise(tmp_path / "copy", seed)
        except Exception as error:
            raise AssertionError(what) from error
        assert time.monotonic() - started < 20, what
    assert 0 < loaded < 60
    assert capfd.readouterr().err == ""
