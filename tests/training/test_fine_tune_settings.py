"""Settings of fine-tuning: flags, files and the names of mlx-lm."""

import math
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.fine_tune_settings import fine_tune_settings
from mlx_mmfree.training.optimizer import named_schedule


def test_schedules_follow_mlx_lm() -> None:
    from mlx_lm.tuner.utils import build_schedule

    for description in (
        {"name": "cosine_decay", "arguments": [1e-3, 20, 1e-5], "warmup": 5, "warmup_init": 1e-6},
        {"name": "linear_schedule", "arguments": [1e-3, 1e-4, 10]},
        {"name": "exponential_decay", "arguments": [1e-3, 0.9], "warmup": 2},
        {"name": "step_decay", "arguments": [1e-3, 0.5, 4]},
    ):
        ours, theirs = named_schedule(description), build_schedule(description)
        for step in range(25):
            assert ours(step).item() == pytest.approx(theirs(mx.array(step)).item(), rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1e999"])
@pytest.mark.parametrize("key", ["arguments", "warmup_init"])
def test_numbers_of_a_schedule_are_finite(key: str, value: Any) -> None:
    description = {"name": "cosine_decay", "arguments": [1e-3, 9], "warmup": 2}
    description[key] = [value, 9] if key == "arguments" else value
    with pytest.raises(TrainingError, match=r"'lr_schedule' must have .* must be finite but got"):
        named_schedule(description)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'data' must be given"),
        ({"data": "d", "ranks": 3}, "unknown keys ranks. The known keys are data, adapter_path"),
        ({"data": "d", "iters": 0}, "'iters' must be positive but got 0"),
        ({"data": "d", "iters": 2.5}, "'iters' must be a whole number but got 2.5"),
        ({"data": "d", "iters": True}, "'iters' must be a whole number but got True"),
        ({"data": "d", "learning_rate": "fast"}, "could not convert string to float"),
        ({"data": "d", "learning_rate": math.nan}, "'learning_rate' must be finite but got nan"),
        ({"data": "d", "pack": "yes"}, "'pack' must be true or false but got 'yes'"),
        ({"data": 3}, "'data' must be text but got 3"),
        ({"data": "d", "num_layers": 0}, "'num_layers' must be positive, or -1 for all, but got 0"),
        ({"data": "d", "optimizer": "lion"}, "'optimizer' must be one of adam, adamw"),
        ({"data": "d", "fine_tune_type": "loha"}, "must be one of lora, dora, full"),
        ({"data": "d", "dropout": 1}, "'dropout' must be at least 0 and below 1"),
        ({"data": "d", "keys": "q_proj"}, "'keys' must be a list of names but got 'q_proj'"),
        ({"data": "d", "lr_schedule": "cosine"}, "'lr_schedule' must be a mapping"),
        (
            {"data": "d", "lr_schedule": {"name": "steps"}},
            "'lr_schedule' must be named one of cosine",
        ),
        ({"data": "d", "lora_parameters": {"alpha": 3}}, "'lora_parameters' may hold only rank"),
        (
            {"data": "d", "fine_tune_type": "full", "resume_adapter_file": "a"},
            "'resume_adapter_file' must be left out",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        fine_tune_settings(values, "the flags")


def test_parameters_of_mlx_lm_are_read() -> None:
    nested = {"rank": 16, "scale": 10, "dropout": 0.1, "keys": ["self_attn.q_proj"]}
    settings = fine_tune_settings(
        {"data": "d", "lora_parameters": nested, "rank": 4, "learning_rate": "1e-5"}, "x"
    )
    assert (settings.rank, settings.scale, settings.dropout) == (4, 10.0, 0.1)
    assert (settings.keys, settings.learning_rate) == (("self_attn.q_proj",), 1e-5)
