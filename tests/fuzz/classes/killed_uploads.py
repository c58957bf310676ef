"""Uploads killed at any moment and started again."""

import json
import os
import random
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tests.fuzz.base_model import make_base
from tests.fuzz.case import command_class
from tests.fuzz.commands import apart, contents, run, start
from tests.fuzz.hub_process import HubProcess, log_in
from tests.hub.hub_server import TOKEN, Repository

_REPOSITORY = "me/model"
_FLAGS = ([], [], ["--private"], ["--revision", "next"])
_CARD = "README.md"


def make_sources(folder: Path) -> None:
    """A model, an older state of its repository, and how long an upload takes that nobody kills."""
    apart(lambda: make_base(folder / "model", "hgrn"), folder)
    shutil.copytree(folder / "model", folder / "older")
    (folder / "older" / "config.json").write_text("{}")
    (folder / "older" / "notes.txt").write_text("kept")
    with HubProcess(folder) as hub:
        started = time.monotonic()
        run(_arguments(folder / "model", []), folder, log_in(hub.url, TOKEN))
        seconds = time.monotonic() - started
        card = hub.repositories()[_REPOSITORY].branches["main"][_CARD]
    (folder / _CARD).write_bytes(card)
    (folder / "seconds.json").write_text(json.dumps(seconds))


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Chooses the flags, whether the repository is there already, and the moments of the deaths."""
    shutil.copytree(sources / "model", target / "model")
    shutil.copyfile(sources / _CARD, target / _CARD)
    flags = rng.choice(_FLAGS)
    is_update = "--private" not in flags and rng.random() < 0.5
    if is_update:
        shutil.copytree(sources / "older", target / "older")
    seconds = json.loads((sources / "seconds.json").read_text())
    delays = [rng.uniform(0, 1.1) * seconds for _ in range(rng.choice((1, 1, 2)))]
    (target / "plan.json").write_text(json.dumps([flags, delays]))
    return f"{' '.join(flags)} killed after {delays}, update: {is_update}"


def _arguments(model: Path, flags: list[str]) -> list[str]:
    return ["upload", "--path", str(model), "--upload-repo", _REPOSITORY, *flags]


def exercise(folder: Path, rng: random.Random) -> None:
    """Kills, looks at what is left here and on the Hub, and runs to the end."""
    flags, delays = json.loads((folder / "plan.json").read_text())
    printed = folder / "printed"
    printed.mkdir()
    older = folder / "older"
    arguments = _arguments(folder / "model", flags)
    home = Path(os.environ["HF_HOME"])
    model, cached = contents(folder / "model"), contents(home)
    before = contents(older) if older.exists() else {}
    after = {_CARD: (folder / _CARD).read_bytes(), **before, **model}
    with HubProcess(folder, {_REPOSITORY: older} if older.exists() else {}) as hub:
        prepare = log_in(hub.url, TOKEN)
        for delay in delays:
            start(arguments, printed, prepare).kill(delay)
            _check_branches(hub.repositories(), flags, (before, after))
        run(arguments, printed, prepare)
        repositories = hub.repositories()
        _check_branches(repositories, flags, (before, after))
    branch = "next" if "--revision" in flags else "main"
    if repositories[_REPOSITORY].branches[branch] != after:
        raise AssertionError(f"the second upload left {sorted(repositories[_REPOSITORY].branches)}")
    if (contents(folder / "model"), contents(home)) != (model, cached):
        raise AssertionError(f"the upload left files here: {sorted(contents(home))[:8]}")


def _check_branches(
    repositories: Mapping[str, Repository], flags: list[str], allowed: tuple[object, ...]
) -> None:
    """A reader of the Hub sees all of an upload or nothing of it, and nothing private."""
    for repository in repositories.values():
        if "--private" in flags and not repository.is_private:
            raise AssertionError("the private repository is public")
        for branch, files in repository.branches.items():
            if files not in allowed:
                raise AssertionError(f"branch {branch} holds a part of the upload: {sorted(files)}")


CLASS = command_class(make_sources, mutate, exercise, refusals=())
