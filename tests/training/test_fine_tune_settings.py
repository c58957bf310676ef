"""Settings of fine-tuning: flags, files and the names of mlx-lm."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.fine_tuning.settings import fine_tune_settings
from mlx_mmfree.training.optimizer import named_optimizer, named_schedule
from mlx_mmfree.training.run_settings import read_mapping

COSINE = {"name": "cosine_decay", "arguments": [1e-3, 10]}


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
        ({"data": "d", "ranks": 3}, "unknown keys ranks. Did you mean 'rank'?"),
        ({"data": "d", "iters": 0}, "'iters' must be positive but got 0"),
        ({"data": "d", "iters": 2.5}, "'iters' must be a whole number but got 2.5"),
        ({"data": "d", "iters": True}, "'iters' must be a whole number but got True"),
        ({"data": "d", "learning_rate": "fast"}, "'learning_rate' must be a number but got 'fast'"),
        ({"data": "d", "iters": "forty"}, "'iters' must be a whole number but got 'forty'"),
        (
            {"data": "d", "lora_parameters": {"rank": "high"}},
            "'rank' must be a whole number but got",
        ),
        ({"data": "d", "learning_rate": math.nan}, "'learning_rate' must be finite but got nan"),
        ({"data": "d", "pack": "yes"}, "'pack' must be true or false but got 'yes'"),
        ({"data": 3}, "'data' must be text but got 3"),
        ({"data": "d", "num_layers": 0}, "'num_layers' must be positive, or -1 for all, but got 0"),
        ({"data": "d", "optimizer": "lion"}, "'optimizer' must be one of adam, adamw"),
        ({"data": "d", "fine_tune_type": "loha"}, "must be one of lora, dora, full"),
        ({"data": "d", "dropout": 1}, "'dropout' must be at least 0 and below 1"),
        ({"data": "d", "keys": "q_proj"}, "'keys' must be a list but got 'q_proj'"),
        ({"data": "d", "keys": [3]}, "'keys' must be a list of names but holds 3"),
        ({"data": "d", "lr_schedule": "cosine"}, "'lr_schedule' must be a mapping"),
        (
            {"data": "d", "lr_schedule": {"name": "steps"}},
            "'lr_schedule' must be named one of cosine",
        ),
        (
            {"data": "d", "lr_schedule": {"name": "cosine_decay", "arguments": [1e-3]}},
            "'lr_schedule' must have name and arguments",
        ),
        (
            {"data": "d", "lr_schedule": {**COSINE, "warmup": 1.5}},
            "'warmup' must be a whole number but got 1.5",
        ),
        (
            {"data": "d", "lr_schedule": {"name": ["cosine_decay"]}},
            "'lr_schedule' must be named one of cosine",
        ),
        (
            {"data": "d", "lr_schedule": {"name": "cosine_decay", "arguments": ["fast", 9]}},
            "'lr_schedule' must have .*: each of 'arguments' must be a number but got 'fast'",
        ),
        (
            {"data": "d", "optimizer_config": {"adam": 3}},
            "'optimizer_config' must hold mappings under the names adam.* but holds 3 under 'adam'",
        ),
        (
            {"data": "d", "optimizer_config": {"lion": {}}},
            "'optimizer_config' must hold mappings under the names adam.* under 'lion'",
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


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("adamw", {"eps": "small"}, "'eps' must be a number but got 'small'"),
        ("adamw", {"eps": float("inf")}, "'eps' must be finite but got inf"),
        ("adamw", {"eps": None}, "'eps' must be a number but got None"),
        ("adamw", {"betas": 0.9}, "'betas' must be 2 numbers but got 0.9"),
        ("adamw", {"betas": [0.9]}, r"'betas' must be 2 numbers but got \[0.9\]"),
        ("adamw", {"momentum": 0.9}, "momentum is not one of betas, eps, weight_decay"),
        ("adam", {"learning_rate": 1}, "learning_rate is not one of betas, eps"),
        ("adam", {"bias_correction": "yes"}, "'bias_correction' must be true or false"),
        ("adafactor", {"eps": 1e-3}, "'eps' must be 2 numbers"),
        ("muon", {"ns_steps": 2.5}, "'ns_steps' must be a whole number but got 2.5"),
        ("sgd", {"nesterov": True}, "Nesterov momentum requires"),
    ],
)
def test_wrong_options_of_an_optimizer_are_named(
    optimizer: str, options: Any, message: str
) -> None:
    values = {"data": "d", "optimizer": optimizer, "optimizer_config": {optimizer: options}}
    with pytest.raises(TrainingError, match=f"must hold options of {optimizer}.*{message}"):
        fine_tune_settings(values, "the flags")


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("adam", "{betas: [9e-1, 99e-2], eps: 1e-6, bias_correction: true}"),
        ("adamw", "{betas: [9e-1, 99e-2], eps: 1e-6, weight_decay: 1e-2}"),
        ("adamw8bit", "{betas: [9e-1, 99e-2], eps: 1e-6, weight_decay: 1e-2}"),
        ("sgd", "{momentum: 9e-1, weight_decay: 1e-2, dampening: 0, nesterov: true}"),
        (
            "adafactor",
            "{eps: [1e-30, 1e-3], clip_threshold: 1e0, decay_rate: -8e-1, beta_1: 9e-1, "
            "weight_decay: 1e-2, scale_parameter: false, warmup_init: false}",
        ),
        ("muon", "{momentum: 95e-2, weight_decay: 1e-2, nesterov: true, ns_steps: 5e0}"),
    ],
)
def test_exponents_are_numbers_everywhere(tmp_path: Path, optimizer: str, text: str) -> None:
    file = tmp_path / "lora.yaml"
    file.write_text(
        f"data: d\noptimizer: {optimizer}\noptimizer_config: {{{optimizer}: {text}}}\n"
        "learning_rate: 1e-5\niters: 1e3\nlora_parameters: {rank: 1e1, scale: 2e1, dropout: 1e-1}\n"
        "lr_schedule: {name: cosine_decay, arguments: [1e-5, 1e3, 1e-7], warmup: 1e1, "
        "warmup_init: 1e-7}\n"
    )
    settings = fine_tune_settings(read_mapping(file, "lora"), "the file")
    assert (settings.learning_rate, settings.iters, settings.rank) == (1e-5, 1000, 10)
    assert type(settings.iters) is type(settings.rank) is int
    assert (settings.scale, settings.dropout) == (20.0, 0.1)
    assert settings.lr_schedule is not None
    schedule = named_schedule(settings.lr_schedule)
    assert schedule(0).item() == pytest.approx(1e-7)
    assert schedule(11).item() == pytest.approx(1e-5, rel=1e-4)
    model = nn.Linear(4, 4)
    step = named_optimizer(optimizer, 1e-2, settings.optimizer_config[optimizer])
    step.update(model, {"weight": mx.ones((4, 4)), "bias": mx.ones(4)})
    assert mx.isfinite(model.weight).all()


def test_parameters_of_mlx_lm_are_read() -> None:
    nested = {"rank": 16, "scale": 10, "dropout": 0.1, "keys": ["self_attn.q_proj"]}
    settings = fine_tune_settings(
        {"data": "d", "lora_parameters": nested, "rank": 4, "learning_rate": "1e-5"}, "x"
    )
    assert (settings.rank, settings.scale, settings.dropout) == (4, 10.0, 0.1)
    assert (settings.keys, settings.learning_rate) == (("self_attn.q_proj",), 1e-5)
