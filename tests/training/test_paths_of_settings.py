"""A path of a YAML file begins at that file, a path of a flag at the current folder."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_mmfree.cli import distil, lora, train
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.distil.settings import DistilSettings, read_settings
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings, fine_tune_settings

Captured = pytest.CaptureFixture[str]
TRAIN = {
    "output": "run",
    "init_from": "model",
    "stages": [{"until": 1, "weights": {"train.txt": 1}}],
    "steps": 200,
}
DISTIL = {"model": "teacher", "to": "same", "data": ["a.txt", "b.txt"], "valid": "v.txt"}


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for YAML files; the current folder is the one around it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes"
    folder.mkdir()
    return folder


def written(folder: Path, values: dict[str, Any]) -> str:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(file.relative_to(folder.parent))


def of_lora(*flags: str) -> tuple[FineTuneSettings, str | None]:
    args = lora.build_parser().parse_args(["--train", *flags])
    return lora._settings(args), args.model


def test_paths_of_a_file_begin_there(recipes: Path, capsys: Captured) -> None:
    for name in ("data", "model", "teacher"):
        (recipes / name).mkdir()
        # of two, that beside the file is taken
        (recipes.parent / name).mkdir()
    config = written(recipes, {"model": "model", "data": "data", "output": "run", "steps": 7})
    settings, model = of_lora("-c", config)
    assert (settings.data, settings.adapter_path) == ("recipes/data", "recipes/run")
    assert (model, settings.iters) == ("recipes/model", 7)
    config = written(recipes, {**DISTIL, "output": "student"})
    read = read_settings(Path(config), {}, DistilSettings)
    assert (read.output, read.model) == ("recipes/student", "recipes/teacher")
    assert (read.data, read.valid) == (("recipes/a.txt", "recipes/b.txt"), ("recipes/v.txt",))
    assert capsys.readouterr().err == ""


def test_names_of_the_hub_and_absolute_paths_stay(recipes: Path, capsys: Captured) -> None:
    data = str(recipes / "data")
    values = {"model": "owner/name", "data": data, "teacher": "owner/other"}
    settings, model = of_lora("-c", written(recipes, values))
    assert (model, settings.data, settings.teacher) == ("owner/name", data, "owner/other")
    # what no one wrote into the file begins at the current folder
    assert settings.adapter_path == "adapters"
    assert capsys.readouterr().err == ""


def test_paths_of_flags_begin_at_the_current_folder(recipes: Path, capsys: Captured) -> None:
    (recipes.parent / "data").mkdir()
    config = written(recipes, {**TRAIN, "tokenizer": None})
    flags = ["-c", config, "--output", "here", "--teacher", "owner/name"]
    settings = train._settings(train.build_parser().parse_args(flags))
    assert settings.path(settings.output).resolve() == recipes.parent / "here"
    assert settings.teacher == "owner/name"
    # paths of the file still begin there
    assert settings.path(str(settings.init_from)).resolve() == recipes / "model"
    settings, _ = of_lora("-c", written(recipes, {"data": "no"}), "--data", "data")
    assert settings.data == "data"
    args = distil.build_parser().parse_args(["-c", config, "--output", "there"])
    assert args.output == "there"
    assert capsys.readouterr().err == ""


def test_paths_are_right_through_links(
    recipes: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = written(recipes, TRAIN)
    linked = tmp_path_factory.mktemp("elsewhere") / "deep" / "link"
    linked.parent.mkdir()
    linked.symlink_to(recipes)
    flags = ["-c", str(linked / Path(config).name), "--output", "here"]
    settings = train._settings(train.build_parser().parse_args(flags))
    settings.path(settings.output).mkdir()
    assert (recipes.parent / "here").is_dir()


def test_both_names_of_a_setting_are_refused() -> None:
    values = {"data": "d", "steps": 1, "iters": 2}
    with pytest.raises(TrainingError, match="'steps' must come without 'iters'"):
        fine_tune_settings(values, "the flags")
