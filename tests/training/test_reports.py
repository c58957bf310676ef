"""Output of a run: its weights and data first, then a line for each report and validation."""

import re
from pathlib import Path

import pytest

from mlx_mmfree import demo, load_model
from mlx_mmfree.cli.lora import main as lora
from mlx_mmfree.cli.train import main as train
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import hgrn_bit, llama
from mlx_mmfree.training.reports import StepReports, array_sizes, describe_weights, parameter_count

_NUMBER = r"[\d,.e-]+"
_REPORT = rf"loss {_NUMBER}, learning rate {_NUMBER}, {_NUMBER} tokens/s, peak memory {_NUMBER} GB"


def _lines(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith("Step ")]


def test_fine_tuning_tells_each_report_and_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time. <|endoftext|>" * 8)
    flags = ["--data", str(tmp_path / "a.txt"), "--valid-share", "0.25", "--num-layers", "1"]
    flags += ["--output", str(tmp_path / "run"), "--batch-size", "2", "--steps", "4"]
    flags += ["--steps-per-report", "2", "--steps-per-eval", "4"]
    assert lora(["--train", *flags]) == 0
    shown = capsys.readouterr().out
    assert "The model has 9,259,801 parameters, 8,454,144 of them ternary. Its matrices" in shown
    assert "train: 6 samples, " in shown and "A step learns from 2 samples, about " in shown
    wanted = [
        rf"Step 0 of 4: validation loss {_NUMBER}",
        rf"Step 2 of 4: {_REPORT}",
        rf"Step 4 of 4: {_REPORT}",
        rf"Step 4 of 4: validation loss {_NUMBER}",
    ]
    assert all(map(re.fullmatch, wanted, _lines(shown))) and len(_lines(shown)) == 4


def test_a_run_that_is_repeated_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time.")
    flags = ["--data", str(tmp_path / "a.txt"), "--num-layers", "1", "--batch-size", "1"]
    flags += ["--train", "--output", str(tmp_path / "run"), "--steps"]
    for steps, words in (
        ("1", "Step 1 of 1: loss"),
        ("1", "The run has done 1 step of 1 before. Give more steps to go on"),
        ("2", "The run goes on after step 1."),
    ):
        assert lora([*flags, steps]) == 0
        shown = capsys.readouterr().out
        assert words in shown and shown.count("The run ") == (words[:8] == "The run ")


CONFIG = """
output: run
model:
  {model_type: hgrn_bit, vocab_size: 300, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1}
stages: [{until: 1, weights: {a.txt: 1}}]
steps: 2
warmup_steps: 1
steps_per_report: 1
batch_size: 2
accumulation_steps: 3
sequence_length: 8
"""


def test_training_without_validation_names_no_best_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time there was a frog. " * 100)
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert train(["--config", str(tmp_path / "run.yaml")]) == 0
    shown = capsys.readouterr().out
    assert [line[: len("Step 1 of 2: loss")] for line in _lines(shown)] == [
        "Step 1 of 2: loss",
        "Step 2 of 2: loss",
    ]
    assert "2 steps, learned from 96 tokens." in shown and "est step" not in shown
    assert re.search(rf"{_NUMBER} tokens to learn from; 48 a step, in 6 sequences of 8\.", shown)
    assert re.search(rf"has {_NUMBER} parameters, {_NUMBER} of them ternary\. Its matrices", shown)


@pytest.mark.exhaustive
def test_a_run_without_a_better_step_says_that_nothing_was_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.txt").write_text("xq zv " * 20)
    (tmp_path / "valid.txt").write_text("Once upon a time there was a little girl.")
    flags = ["--data", str(tmp_path), "--output", str(tmp_path / "run"), "--num-layers", "-1"]
    flags += ["--batch-size", "1", "--steps", "3", "--learning-rate", "0.1"]
    assert lora(["--train", *flags]) == 0
    shown = capsys.readouterr().out
    assert "at the best step 0." in shown
    assert "Nothing was learned: no step was better" in shown and "lower --learning-rate" in shown


def test_weights_of_a_dense_and_of_a_ternary_model() -> None:
    config = llama.Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
    )
    model = llama.build(config)
    total = array_sizes(model.parameters())
    assert describe_weights(model) == (
        f"The model has {total:,} parameters, 0 of them ternary. Its matrices are stored as float32."
    )
    packed = load_model(demo.path())
    ternary = sum(
        matrix.input_dims * matrix.output_dims
        for matrix in matrices(packed).values()
        if matrix.holds_trits
    )
    assert f"{ternary:,} of them ternary" in describe_weights(packed)
    masters = hgrn_bit.build(hgrn_bit.Config(vocab_size=64, hidden_size=16, num_hidden_layers=1))
    assert "stored as float32 rounded to ternary and float32." in describe_weights(masters)
    assert parameter_count(masters) == array_sizes(masters.parameters())


def test_rewards_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"step": 3, "loss": 0.5, "reward": 0.25, "reward_std": 0.1, "learning_rate": 1e-5}
    StepReports(9).on_train(record | {"tokens_per_second": 1234.5, "peak_memory_bytes": 2e9})
    StepReports().on_validation({"step": 3, "valid_loss": -0.25, "valid_reward": 0.25})
    assert capsys.readouterr().out.splitlines() == [
        "Step 3 of 9: loss 0.5000, reward 0.25, reward deviation 0.1, learning rate 1e-05, "
        "1,234 tokens/s, peak memory 2.000 GB",
        "Step 3: validation loss -0.2500, reward 0.2500",
    ]
