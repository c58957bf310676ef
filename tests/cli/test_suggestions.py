"""A slip, or a name of ollama or mlx-lm, is answered with the name that is meant."""

import argparse
from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts import suggestions
from mlx_mmfree.cli.parts.registry import command_names
from tests.cli.flags_of_commands import parsers


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["generat"], "'mmfree generate'?"),
        (["cache-prompt"], "'mmfree cache_prompt'?"),
        (["Chat"], "'mmfree chat'?"),
        (["list"], "'mmfree models'?"),
        (["ls"], "'mmfree models'?"),
        (["ps"], "'mmfree models'?"),
        (["server", "--port", "9"], "'mmfree serve'?"),
        (["rm", "a/b"], "'mmfree models --remove a/b'?"),
        (["pull"], "'mmfree run MODEL'? It downloads the model first."),
        (["help", "benchmrk"], "'mmfree bench'?"),
    ],
)
def test_commands(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.endswith(f"Did you mean {meant}\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["chat", "--temperature", "1"], "--temp?"),
        (["run", "tiny", "--temprature=1", "Hello"], "--temp?"),
        (["generate", "--max_new_tokens", "9"], "--max-tokens?"),
        (
            ["generate", "--max_tokens", "9", "--systm-prompt", "x"],
            "--max-tokens and --system-prompt?",
        ),
        (["lora", "--lr", "1"], "--learning-rate?"),
        (["lora", "--epochs", "3"], "--steps?"),
        (["serve", "--prot", "1"], "--port?"),
        (["show", "weights", "--modle", "x"], "--model?"),
        (["chat", "a/b"], "--model a/b?"),
        (["generate", "a/b"], "--model a/b?"),
        (["generate", "Once upon"], "--prompt 'Once upon'?"),
        (["generate", "Hi"], "--prompt Hi or --model Hi?"),
        (["translate", "--model", "x", "--text", "x", "Hi"], "--text Hi or --model Hi?"),
        (["chat", "Hi"], "--model Hi?"),
    ],
)
def test_flags(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert f". Did you mean {meant} See 'mmfree {words[0]} --help'.\n" in shown


@pytest.mark.parametrize(
    "words", [["xyzzy"], ["chat", "--xyzzy"], ["doctor", "-", "x"], ["chat", "a", "b"]]
)
def test_nothing_is_guessed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_what_is_suggested_exists() -> None:
    known: dict[str, argparse.ArgumentParser] = {each.prog: each for each in parsers()}
    flags = {name for each in known.values() for name in each._option_string_actions}
    assert {f"--{name}" for name in suggestions._FLAGS.values()} <= flags
    for name, meant in suggestions._COMMANDS.items():
        words = f"mmfree {meant}".split()
        assert name not in command_names()
        assert meant == "--version" or known[" ".join(words[:2])]
        own = known.get(" ".join(words[:3]), known.get(" ".join(words[:2])))
        assert own is None or {w for w in words if w[:2] == "--"} <= {*own._option_string_actions}


@pytest.mark.parametrize("command", ["train", "distil", "ternarize", "calibrate", "lora"])
def test_the_nearest_key_of_a_file_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meant = {"outputt": "output", "batch-size": "batch_size", "modle": "model", "seeed": "seed"}
    if command == "lora":
        meant |= {"lr": "learning_rate", "lora_parameter": "lora_parameters", "step": "steps"}
    file = tmp_path / "run.yaml"
    for key, name in meant.items():
        file.write_text(f"{key}: 1\n" + ("train: true\n" if command == "lora" else ""))
        assert main([command, "--config", str(file)]) == 2
        words = f"[{command}] '{file}' has unknown keys {key}. Did you mean '{name}'?\n"
        assert capsys.readouterr().err == f"error: {words}"


def test_a_wrong_value_of_a_file_is_named_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    flags = ["lora", "--config", str(file)]
    for text, words in (
        ("learning_rate: fast", "'learning_rate' must be a number but got 'fast'"),
        ("batch_size: 0", "'batch_size' must be positive but got 0"),
        ("optimizer: adamx", "'optimizer' must be one of"),
    ):
        file.write_text(f"train: true\ndata: d\n{text}\n")
        assert main(flags) == 2
        assert words in capsys.readouterr().err
    assert main([*flags, "--optimizer", "sgd", "--batch-size", "0"]) == 2
    assert "--batch-size" in capsys.readouterr().err
