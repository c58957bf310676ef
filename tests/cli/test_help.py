"""One thing is one flag: what help shows, what it only names, and which names of mlx-lm work too."""

import re
from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.parser import MLX_LM, CommandParser
from tests.cli.flags_of_commands import counts, first_name, flags, parsers
from tests.cli.test_mlx_lm_flags import OURS, their_flags

PARSERS = {parser.prog.removeprefix("mmfree "): parser for parser in parsers()}
# a command, a name of mlx-lm, and the flag
THEIRS = [
    ("convert", "--mlx-path", "--output"),
    ("convert", "--hf-path", "--model"),
    ("fuse", "--save-path", "--output"),
    ("fuse", "--data-path", "--data"),
    ("evaluate", "--output-dir", "--output"),
    ("lora", "--adapter-path", "--output"),
    ("lora", "--iters", "--steps"),
    ("lora", "--max-seq-length", "--sequence-length"),
    ("lora", "--grad-accumulation-steps", "--accumulation-steps"),
    ("perplexity", "--data-path", "--data"),
    ("upload", "--path", "--model"),
    *((name, "--chat-template-config", "--chat-template-args") for name in ("chat", "generate")),
]
# what a flag means everywhere, and where the word means something else
MEANINGS = {
    "--model": "model",
    "--seed": "seed|drawn",
    "--picture": "PNG file",
    "--output": "folder",
    "--json": "JSON object",
    "--plugin": "Python file",
    "--overwrite": "replace",
}


def help_of(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ending:
        main([*name.split(), flag])
    assert ending.value.code == 0
    return capsys.readouterr().out


def names_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_the_number_of_flags() -> None:
    found = counts()
    # `python -m tests.cli.flags_of_commands` prints them
    assert found["flags"] <= 680 and found["distinct"] <= 250
    assert found["usual"] <= 220 and found["distinct usual"] <= 95


@pytest.mark.parametrize("name", PARSERS)
def test_help_fits_a_newcomer(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = help_of(name, "--help", capsys)
    parser = PARSERS[name]
    usual = list(filter(parser.is_explained, flags(parser)))
    assert len(usual) <= 14 and shown.count("\n") <= 50
    known = {each for flag in flags(parser) for each in flag.option_strings}
    assert set(parser.usual.split()) <= known
    assert {first_name(flag) for flag in usual} <= names_in(shown)
    rare = {first_name(flag) for flag in flags(parser) if flag not in usual}
    assert rare & names_in(shown) <= MLX_LM | names_in(parser.epilog or "")


@pytest.mark.parametrize("name", PARSERS)
def test_help_all_explains_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = PARSERS[name]
    known = {each for flag in flags(parser) for each in flag.option_strings}
    shown = help_of(name, "--help-all", capsys)
    assert {each for each in known if each.startswith("--")} <= names_in(shown)
    assert not any(flag.help is None for flag in flags(parser))


@pytest.mark.parametrize("name", OURS)
def test_help_names_all_that_mlx_lm_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = PARSERS[name]
    shared = their_flags(name) & {each for flag in flags(parser) for each in flag.option_strings}
    shown = names_in(help_of(name, "--help", capsys))
    assert {each for each in shared if each.startswith("--")} <= shown


def test_names_of_mlx_lm_are_theirs() -> None:
    theirs = set().union(*map(their_flags, OURS))
    assert theirs >= MLX_LM


@pytest.mark.parametrize(("name", "theirs", "flag"), THEIRS)
def test_each_name_is_the_same_flag(
    name: str, theirs: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = PARSERS[name]._option_string_actions
    assert known[theirs] is known[flag]
    assert {theirs, flag} <= names_in(help_of(name, "--help-all", capsys))
    assert theirs in names_in(help_of(name, "--help", capsys))


def test_a_flag_means_one_thing() -> None:
    for parser in PARSERS.values():
        for flag in flags(parser):
            for name, words in MEANINGS.items():
                if first_name(flag) == name:
                    assert re.search(words, str(flag.help)), (parser.prog, name)


def test_a_message_names_the_flag_as_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent.txt")
    for flag in ("--data", "--data-path"):
        assert main(["perplexity", flag, absent]) == 2
        assert f"[perplexity] {flag} must be a UTF-8 text file" in capsys.readouterr().err
    assert main(["perplexity"]) == 2
    assert "required: --data/--data-path. See" in capsys.readouterr().err
    assert main(["lora", "--train", "--data", str(tmp_path), "--iters", "0"]) == 2
    assert "--iters must be positive" in capsys.readouterr().err


def test_a_command_without_usual_flags_explains_all() -> None:
    parser = CommandParser(prog="mmfree own", description="`mmfree own`: does this.")
    parser.add_argument("--this", "--that", action="store_true", help="do it")
    assert "--this" in parser.format_help() and "--that" in parser.format_help()
