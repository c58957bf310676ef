"""Reading and checking the settings of a run."""

import os
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest
import yaml

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training import read_settings
from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.distil.settings import read_settings as read_distil_settings
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings, fine_tune_settings
from mlx_mmfree.training.run_settings import SHARE
from mlx_mmfree.training.settings import Settings


def test_values_and_overrides(config: Path) -> None:
    settings = read_settings(config, {"steps": 9, "seed": None})
    assert (settings.steps, settings.seed, settings.batch_size) == (9, 0, 2)
    assert settings.stages[0].weights == {"train.txt": 1.0, "more.txt": 2.0}
    assert settings.path("train.txt") == config.parent / "train.txt"


def test_number_without_a_dot_is_a_number(config: Path) -> None:
    config.write_text(config.read_text().replace("learning_rate: 0.01", "learning_rate: 1e-2"))
    assert read_settings(config).learning_rate == 0.01


def stages(until: float, *weights: Any) -> list[dict[str, Any]]:
    return [{"until": until, "weights": {f"{n}.txt": weight for n, weight in enumerate(weights)}}]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "unknown keys stepz"),
        ({"steps": 0}, "'steps' must be positive but got 0"),
        ({"steps": 2.5}, "'steps' must be a whole number but got 2.5"),
        ({"steps": "forty"}, "'steps' must be a whole number but got 'forty'"),
        ({"learning_rate": "fast"}, "'learning_rate' must be a number but got 'fast'"),
        ({"warmup_steps": 6}, "'warmup_steps' must be at least 0 and below 'steps'"),
        ({"stages": "my.txt"}, "'stages' must be a list but got 'my.txt'"),
        ({"stages": ["my.txt"]}, "'stages' must hold stages like .* but one is 'my.txt'"),
        ({"stages": stages(1, "much")}, "the weight of '0.txt' must be a number but got 'much'"),
        (
            {"stages": [stages(1, 1.0)[0] | {"rate": 1}]},
            "'stages' must hold stages like .* but one is {'rate'",
        ),
        ({"valid": "my.txt"}, "'valid' must be a list but got 'my.txt'"),
        ({"stages": []}, "'stages' must have rising values of 'until'"),
        ({"stages": [{"until": 0.5, "weights": {"train.txt": 1}}]}, "the last of them 1"),
        (
            {"stages": [{"weights": {}}]},
            r"'stages' must hold stages like .* but one is \{'weights'",
        ),
        (
            {"stages": stages(1, 1.0, -1.0)},
            "'weights' of a stage must be at least 0, and one of them above",
        ),
        (
            {"stages": stages(1, 0.0)},
            "'weights' of a stage must be at least 0, and one of them above 0",
        ),
        ({"stages": stages(1)}, "'weights' of a stage must be at least 0, and one of them above 0"),
        ({"stages": stages(1, float("nan"))}, "the weight of '0.txt' must be finite but got nan"),
        ({"stages": stages(float("nan"), 1)}, "'until' of a stage must be finite but got nan"),
        ({"valid": 3}, "'valid' must be a list but got 3"),
        ({"valid": [3]}, "'valid' must be a list of names but holds 3"),
        ({"betas": "fast"}, "'betas' must be a list but got 'fast'"),
        ({"betas": [0.9, "fast"]}, "each of 'betas' must be a number but got 'fast'"),
        ({"seed": -1}, "'seed' must be at least 0 but got -1"),
        ({"clip_norm": -0.5}, "'clip_norm' must be at least 0 but got -0.5"),
        (
            {"betas": [0.9]},
            r"'betas' must be two numbers of at least 0 and below 1 but got \[0.9\]",
        ),
        ({"dropout": 1}, "'dropout' must be at least 0 and below 1 but got 1"),
        ({"betas": [0.9, 1]}, "'betas' must be two numbers"),
        ({"embedding_std": 0}, "'embedding_std' must be positive but got 0"),
        ({"embedding_std": "wide"}, "'embedding_std' must be a number but got 'wide'"),
        (
            {"model": {}, "init_from": "m", "embedding_std": 1},
            "'embedding_std' must be left out with 'init_from', which has weights, but got 1",
        ),
        ({"model": [1]}, r"'model' must be a mapping but got \[1\]"),
        ({"model": {}}, "'model' must describe the architecture, or 'init_from' must name"),
    ],
    ids=str,
)
def test_wrong_values_are_named(
    tmp_path: Path, run_values: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(run_values | change))
    with pytest.raises(TrainingError, match=message):
        read_settings(path)


def test_many_unknown_keys_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump({f"{'x' * 99}{number}": 1 for number in range(99)}))
    with pytest.raises(
        TrainingError, match=r"x and 91 more\. The known keys are output, "
    ) as error:
        read_settings(path)
    assert len(str(error.value)) < 1500


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    os.mkfifo(path)
    with pytest.raises(TrainingError, match=r"train\.yaml' must be .* a pipe"):
        read_settings(path)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", ""])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(TrainingError, match=r"train\.yaml' must"):
        read_settings(path)
    with pytest.raises(TrainingError, match="must be a readable YAML file"):
        read_settings(tmp_path / "absent.yaml")


WRONG: dict[Any, list[Any]] = {
    int: ["forty", [1], {"a": 1}, True, 1.5],
    float: ["fast", [1], {"a": 1}, True],
    bool: ["yes", 1, [True]],
    str: [3, ["a"], True],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("settings", [Settings, FineTuneSettings, DistilSettings])
def test_every_value_of_another_type_names_its_key(settings: type, tmp_path: Path) -> None:
    """Of all settings, whatever the command."""
    begun: dict[type, dict[str, Any]] = {
        Settings: {"output": "run", "init_from": "model", "stages": stages(1, 1.0)},
        FineTuneSettings: {"data": "data"},
        DistilSettings: {"model": "model", "output": "run", "to": "mlgru", "data": "a.txt"},
    }

    def read(values: dict[str, Any]) -> None:
        file = tmp_path / "settings.yaml"
        file.write_text(yaml.safe_dump(values))
        if settings is Settings:
            read_settings(file)
        elif settings is DistilSettings:
            read_distil_settings(file, {}, DistilSettings)
        else:
            fine_tune_settings(yaml.safe_load(file.read_text()), "the file")

    read(begun[settings])
    seen = 0
    for field in fields(settings):
        # a type, or that or None
        kinds = [] if get_origin(field.type) is tuple else [field.type, *get_args(field.type)]
        wrong = next((WRONG[kind] for kind in kinds if kind in WRONG), [])
        # files of mlx-lm have null for what is left out
        takes_none = NoneType in get_args(field.type) or settings is FineTuneSettings
        if "reader" in field.metadata and not takes_none:
            wrong = [*wrong, None]
        for value in wrong:
            seen += 1
            with pytest.raises(TrainingError, match=rf"'{field.name}' must (be|hold) "):
                read(begun[settings] | {field.name: value})
    assert seen > 50


def test_a_share_is_below_one() -> None:
    assert [SHARE.holds(value) for value in (-0.1, 0, 0.9, 1)] == [False, True, True, False]
