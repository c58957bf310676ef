"""`mmfree run`: a chat with a model that is named first, or one answer."""

import io
import sys
from pathlib import Path

import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.generation import Chat, generate
from mlx_mmfree.hub import load

Captured = pytest.CaptureFixture[str]
FLAGS = ("-m", "6", "--temp", "0")
LIMIT = "[stopped at the limit of 6 tokens]\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe(monkeypatch: pytest.MonkeyPatch, text: str = "") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def answer(folder: Path, prompt: str, **options: str) -> str:
    chat = Chat(*load(folder), max_tokens=6, **options)
    return "".join(response.text for response in chat.answer(prompt))


def test_one_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    expected = answer(folder, "Hello you", system_prompt="Be kind.")
    monkeypatch.setattr(sys, "stdin", Terminal())
    flags = (*FLAGS, "--system-prompt", "Be kind.")
    for words in (
        (str(folder), "Hello you", *flags),
        (str(folder), *flags, "Hello", "you"),
        (*flags, "Hello you", "--model", str(folder)),
    ):
        assert main(["run", *words]) == 0
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == (f"{expected}\n", LIMIT)


@pytest.mark.parametrize(
    ("piped", "words", "prompt"),
    [
        ("Hello\n", [], "Hello"),
        ("", ["Hello"], "Hello"),
        ("A note.\nOf two lines.\n", ["Sum", "up"], "A note.\nOf two lines.\n\nSum up"),
    ],
)
def test_a_pipe(
    piped: str,
    words: list[str],
    prompt: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    pipe(monkeypatch, piped)
    assert main(["run", str(folder), *words, *FLAGS]) == 0
    assert capsys.readouterr().out == f"{answer(folder, prompt)}\n"


def test_a_base_model_continues(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    pipe(monkeypatch, "Once upon a time\n")
    assert main(["run", *FLAGS]) == 0
    text = generate(*load(demo.path()), "Once upon a time", max_tokens=6)
    assert capsys.readouterr().out == f"{text}\n"


def test_a_chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    lines = io.StringIO("Hello\n")
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: lines.readline() or "/exit")
    assert main(["run", str(folder), *FLAGS]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"You are talking with {folder}. ")
    assert answer(folder, "Hello") in shown


@pytest.mark.parametrize("words", [[], ["", "--model", "x"], [".", " "]])
def test_nothing_to_answer(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    pipe(monkeypatch)
    assert main(["run", *words]) == 2
    assert "[run] the prompt must hold a text but is empty" in capsys.readouterr().err


def test_a_mistake_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    pipe(monkeypatch, "Hello")
    assert main(["run", str(folder), "--temp", "-1"]) == 2
    assert main(["run", str(folder), "--system-prompt"]) == 2
    assert main(["run", "no/model//here", "Hello"]) == 2
    assert "--model must be an existing folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        (["Tell me a story"], "'Tell me a story'"),
        (["Tell", "me"], "'Tell me'"),
        (["llama3.2"], "llama3.2"),
        (["llama3.2:1b", "Hi"], "'llama3.2:1b Hi'"),
    ],
)
def test_the_first_word_is_the_model(words: list[str], prompt: str, capsys: Captured) -> None:
    assert main(["run", *words]) == 2
    reported = capsys.readouterr().err
    rule = "the first word must be a model, as a folder or as a Hub repository 'owner/name'"
    assert f"[run] {rule}, but got {words[0]!r}." in reported
    assert "'mmfree models --known' lists repositories" in reported
    assert reported.endswith(f"mmfree generate --prompt {prompt}\n")
