"""`--adapter-path` of the commands that run a model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.generation import Chat, generate
from mlx_mmfree.hub import Tokenizer, load
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.models import Decoder
from tests.cli.test_chat import GREEDY, talk
from tests.cli.test_fuse import TEXT, adapter

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def adapters(attention_folder: Path, tmp_path: Path) -> list[Path]:
    return [adapter(attention_folder, tmp_path / name, seed) for seed, name in enumerate("ab")]


def with_each(folder: Path, adapters: list[Path]) -> list[tuple[list[str], Decoder, Tokenizer]]:
    """The flags and what they should load: the base, then each adapter on it."""
    chosen: list[Path | None] = [None, *adapters]
    loaded = []
    for path in chosen:
        model, tokenizer = load(folder)
        attach(model, None if path is None else read_adapter(path)).eval()
        flags = ["--model", str(folder), *([] if path is None else ["--adapter-path", str(path)])]
        loaded.append((flags, model, tokenizer))
    return loaded


def test_generate(attention_folder: Path, adapters: list[Path], capsys: Captured) -> None:
    shown = set()
    for flags, model, tokenizer in with_each(attention_folder, adapters):
        rest = ["--prompt", "A dog", "--ignore-chat-template", "-m", "8", "--verbose", "F"]
        assert main(["generate", *flags, *rest]) == 0
        shown.add(out := capsys.readouterr().out)
        assert out == generate(model, tokenizer, "A dog", max_tokens=8) + "\n"
    assert len(shown) == 3


def test_chat(
    attention_folder: Path,
    adapters: list[Path],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = set()
    for flags, model, tokenizer in with_each(attention_folder, adapters):
        talk(monkeypatch, "Hello")
        assert main(["chat", *flags, *GREEDY, "--max-tokens", "6"]) == 0
        shown.add(out := capsys.readouterr().out)
        answer = "".join(r.text for r in Chat(model, tokenizer, max_tokens=6).answer("Hello"))
        assert f"\n{answer} [stopped at the limit of 6 tokens]\n" in out
    assert len(shown) == 3


def test_perplexity(
    attention_folder: Path, adapters: list[Path], tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    shown = set()
    for flags, model, tokenizer in with_each(attention_folder, adapters):
        assert main(["perplexity", *flags, "--data", str(file), "--json"]) == 0
        shown.add(got := json.loads(capsys.readouterr().out)["perplexity"])
        tokens = np.array(tokenizer.encode(TEXT), np.int32)
        want = measure_perplexity(model, tokens, len(TEXT), length=512)
        assert got == pytest.approx(want.perplexity, rel=1e-6)
    assert len(shown) == 3


def test_an_adapter_beside_the_weights_is_named(
    attention_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "both"
    shutil.copytree(attention_folder, folder)
    adapter(attention_folder, folder)
    flags = ["--prompt", "A dog", "--ignore-chat-template", "-m", "3", "--model", str(folder)]
    assert main(["generate", *flags]) == 0
    hint = f"--adapter-path {folder}"
    assert hint in capsys.readouterr().err
    assert main(["generate", *flags, *hint.split()]) == 0
    assert "an adapter lies" not in capsys.readouterr().err
