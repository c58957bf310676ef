"""`mmfree lora` with preferences: DPO and ORPO from JSON lines to an adapter."""

import json
from pathlib import Path

import pytest

from mlx_mmfree.cli.lora import main
from mlx_mmfree.training.fine_tuning import preferences
from mlx_mmfree.training.results import read_log
from tests.cli.test_lora import QUICK, _flags


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("train", 6), ("valid", 3), ("test", 3)):
        lines = [
            {"question": f"Who is {n}?", "chosen": "The cat.", "rejected": "The dog."}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.mark.exhaustive
@pytest.mark.equal_bits
@pytest.mark.parametrize("mode", ["dpo", "orpo"])
def test_trains_and_tests(
    folder: Path, data: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = data.parent / "keys.yaml"
    config.write_text("prompt_feature: question\n")
    flags = [*_flags(folder, data), "--train-mode", mode, "-c", str(config)]
    assert main([*flags, *QUICK, "--train", "--test", "--learning-rate", "1e-2"]) == 0
    out = capsys.readouterr().out
    assert "train: 6 samples, " in out and "in 24 tensors of 12 layers: lora." in out
    last = out.splitlines()[-1]
    assert last.startswith("Test loss ") and "is preferred in 100.0% of the pairs" in last
    # the adapter alone gives the same metrics as right after the training, in batches of the same size
    assert main([*flags, *QUICK, "--test"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_another_model_is_the_reference(
    folder: Path, attention_folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--train-mode", "dpo", *QUICK, "--train"]
    losses = []
    for run, other in {
        "own": (),
        "other": ("--reference-model-path", str(attention_folder)),
    }.items():
        assert main([*_flags(folder, data, run), *flags, *other]) == 0
        losses.append(read_log(data.parent / run / "log.jsonl")[1]["valid_loss"])
    assert losses[0] != losses[1]
    capsys.readouterr()
    assert main([*_flags(folder, data, "third"), *flags, "--reference-model-path", str(data)]) == 2
    assert "must hold a checkpoint" in capsys.readouterr().err


def test_dry_run_asks_no_reference(
    folder: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*_flags(folder, data), "--train-mode", "dpo", *QUICK, "--train"]
    assert main(flags) == 0
    plan = next(line for line in capsys.readouterr().out.splitlines() if "memory on" in line)
    monkeypatch.setattr(preferences, "with_reference", None)
    assert main([*flags, "--test", "--adapter-path", str(data / "other"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == plan
    assert not (data / "other").exists()


def test_samples_are_no_pairs(folder: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "train.jsonl").write_text(json.dumps({"text": "The cat."}))
    assert main([*_flags(folder, data), *QUICK, "--train", "--train-mode", "dpo"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "line 1: it must have 'chosen' and 'rejected' but has 'text'" in error


@pytest.mark.exhaustive
def test_rewards_of_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = tmp_path / "problems", tmp_path / "rewards.py"
    data.mkdir()
    file.write_text("def score(completions, level):\n    return [len(c) for c in completions]\n")
    for name in ("train", "valid", "test"):
        lines = [json.dumps({"question": f"Who is {n}?", "level": n}) for n in range(4)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    flags = [*_flags(folder, data), *QUICK, "--train-mode", "grpo", "--group-size", "2"]
    flags += ["--max-completion-length", "4", "--reward-functions-file", str(file)]
    assert main([*flags, "--reward-weights", "0.5", "--train", "--test"]) == 0
    out = capsys.readouterr().out
    assert "train: 4 prompts, " in out and "rewards by score" in out
    assert "Validation reward " in out and out.splitlines()[-1].startswith("Test reward ")
    last = out.splitlines()[-1]
    assert main([*flags, "--reward-weights", "0.5", "--test"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
    file.write_text("def score(completions):\n    return [0 for c in completions][1:]\n")
    assert main([*flags, "--train", "--output", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert (
        "'score' must return a finite number, or None where it does not apply, for each of" in error
    )
