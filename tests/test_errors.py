"""Messages of the library's errors."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import MMFreeError

TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("got 'https://me:pass@huggingface.co/me/x'", "got 'https://…@huggingface.co/me/x'"),
        ("got 'https://me:p@ss@host'", "got 'https://…@host'"),
        ("got 'https:/me:pass@host/x'", "got 'https:/…@host/x'"),
        ("got 'me:pass@host/x'", "got '…@host/x'"),
        ("--model=me:pass@host", "--model=…@host"),
        ("must be 'a@b': c@d", "must be 'a@b': c@d"),
        ("at https://host/x?a=1&token=abc&b=2", "at https://host/x?a=1&token=…&b=2"),
        ("at https://host/x?API_KEY=abc", "at https://host/x?API_KEY=…"),
        (f"got '{TOKEN}/x'", "got 'hf_…/x'"),
        ("'me/hf_tiny' at someone@host", "'me/hf_tiny' at someone@host"),
    ],
)
def test_credentials_are_left_out(text: str, shown: str) -> None:
    assert str(MMFreeError(text)) == shown


HOSTILE = "\x1b[2J\x1b]0;t\x07\x9b2J\u202eabc\r\x7f"


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        ["generate", "--model", HOSTILE],
        ["generate", HOSTILE],
        ["chat", f"--{HOSTILE}"],
        ["run", HOSTILE],
        ["perplexity", "--data", HOSTILE],
        ["train", "--config", HOSTILE],
    ],
)
def test_what_they_quote_steers_no_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even later, from a file to which the errors went."""
    assert main(words) == 2
    reported = capsys.readouterr().err
    assert "[2J" in reported and reported.removesuffix("\n").isprintable()


def test_what_a_file_says_steers_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["generate", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


@pytest.mark.parametrize("command", ["generate", "convert", "upload"])
def test_commands_do_not_repeat_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"https://me:secret@huggingface.co/me/x?token={TOKEN}"
    flags = ["--path", ".", "--upload-repo"] if command == "upload" else ["--model"]
    assert main([command, *flags, address]) == 2
    captured = capsys.readouterr()
    assert "huggingface.co" in captured.err
    assert "secret" not in captured.err + captured.out
    assert "aB3" not in captured.err + captured.out


def test_extras_are_installed_from_a_clone() -> None:
    """No index of packages holds this one, so that only a command of a clone works."""
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    reported = set()
    for path in (root / "mlx_mmfree").rglob("*"):
        if path.suffix in (".py", ".md"):
            text = path.read_text()
            assert not re.search(r"pip install[^`\n]*mlx[-_]mmfree\[", text), path
            reported |= set(re.findall(r"""install_extra\(["'](\w+)["']\)""", text))
    assert {"serve", "vision", "plot", "parquet", "eval"} <= reported <= set(extras)
