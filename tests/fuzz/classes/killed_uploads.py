"""Uploads, of a folder and after `fuse`, killed at any moment and started again."""

import json
import os
import random
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from mlx_mmfree.hub import load_model
from mlx_mmfree.hub.adapters.adapter_folder import write_adapter
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers
from tests.fuzz.base_model import make_base
from tests.fuzz.case import command_class
from tests.fuzz.commands import apart, contents, run, start
from tests.fuzz.hub_process import HubProcess, log_in
from tests.hub.hub_server import TOKEN, Repository

_REPOSITORY = "me/model"
_FLAGS: tuple[list[str], ...] = ([], [], ["--private"], ["--revision", "next"])
_CARD = "README.md"
Files = Mapping[str, bytes | str]
_COMMANDS = ("upload", "fuse")
_UPLOADED, _ADAPTER, _FUSED = "uploaded", "adapter", "fused"


def make_sources(folder: Path) -> None:
    """A model with an adapter, an older state of its repository, and what uploads give, and when."""
    apart(lambda: make_base(folder / "model", "hgrn"), folder)
    apart(partial(_write_adapter, folder), folder)
    shutil.copytree(folder / "model", folder / "older")
    (folder / "older" / "config.json").write_text("{}")
    (folder / "older" / "notes.txt").write_text("kept")
    seconds = {}
    for command in _COMMANDS:
        with HubProcess(folder) as hub:
            started = time.monotonic()
            run(_arguments(command, folder, []), folder, log_in(hub.url, TOKEN))
            seconds[command] = time.monotonic() - started
            files = hub.repositories()[_REPOSITORY].branches["main"]
        for name, data in files.items():
            file = folder / f"{_UPLOADED} by {command}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    (folder / "seconds.json").write_text(json.dumps(seconds))


def _write_adapter(folder: Path) -> None:
    model = load_model(folder / "model", packed=False)
    adapt_layers(model, kind="lora", rank=4, scale=2.0)
    write_adapter(folder / _ADAPTER, model, {"model": "m"})


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Chooses the command, whether the repository is there already, and the moments of the deaths."""
    command = rng.choice(_COMMANDS)
    shutil.copytree(sources / "model", target / "model")
    (target / _ADAPTER).symlink_to(sources / _ADAPTER)
    (target / _UPLOADED).symlink_to(sources / f"{_UPLOADED} by {command}")
    # only an upload of its own says to which branch, and to whom
    flags = rng.choice(_FLAGS) if command == "upload" else []
    is_update = "--private" not in flags and rng.random() < 0.5
    if is_update:
        shutil.copytree(sources / "older", target / "older")
    seconds = json.loads((sources / "seconds.json").read_text())[command]
    delays = [rng.uniform(0, 1.1) * seconds for _ in range(rng.choice((1, 1, 2)))]
    (target / "plan.json").write_text(json.dumps([command, flags, delays]))
    return f"{command} {' '.join(flags)} killed after {delays}, update: {is_update}"


def _arguments(command: str, folder: Path, flags: list[str]) -> list[str]:
    flags = ["--upload-repo", _REPOSITORY, *flags]
    model = str(folder / "model")
    if command == "upload":
        return [command, "--path", model, *flags]
    adapter, fused = str(folder / _ADAPTER), str(folder / _FUSED)
    return [command, "--model", model, "--adapter-path", adapter, "--output", fused, *flags]


def exercise(folder: Path, rng: random.Random) -> None:
    """Kills, looks at what is left here and on the Hub, and runs to the end."""
    command, flags, delays = json.loads((folder / "plan.json").read_text())
    printed = folder / "printed"
    printed.mkdir()
    older = folder / "older"
    arguments = _arguments(command, folder, flags)
    home = Path(os.environ["HF_HOME"])
    model, cached = contents(folder / "model"), contents(home)
    before = contents(older) if older.exists() else {}
    after = {**before, **contents((folder / _UPLOADED).resolve())}
    # fuse writes its flags into the card, --overwrite among them
    left_out = {_CARD} if command == "fuse" else set()
    with HubProcess(folder, {_REPOSITORY: older} if older.exists() else {}) as hub:
        prepare = log_in(hub.url, TOKEN)
        for delay in delays:
            start(_again(arguments, folder), printed, prepare).kill(delay)
            _check_branches(hub.repositories(), flags, (before, after), left_out)
        run(_again(arguments, folder), printed, prepare)
        repositories = hub.repositories()
        _check_branches(repositories, flags, (before, after), left_out)
    branch = "next" if "--revision" in flags else "main"
    files = repositories[_REPOSITORY].branches[branch]
    if files.keys() != after.keys() or not _is_one_of(files, (after,), left_out):
        raise AssertionError(f"the second upload left {sorted(repositories[_REPOSITORY].branches)}")
    if (contents(folder / "model"), contents(home)) != (model, cached):
        raise AssertionError(f"the upload left files here: {sorted(contents(home))[:8]}")


def _again(arguments: list[str], folder: Path) -> list[str]:
    """The arguments where a killed command may have written its folder."""
    return [*arguments, *["--overwrite"] * (folder / _FUSED).exists()]


def _check_branches(
    repositories: Mapping[str, Repository],
    flags: list[str],
    allowed: Sequence[Files],
    left_out: Collection[str],
) -> None:
    """A reader of the Hub sees all of an upload or nothing of it, and nothing private."""
    for repository in repositories.values():
        if "--private" in flags and not repository.is_private:
            raise AssertionError("the private repository is public")
        for branch, files in repository.branches.items():
            if not _is_one_of(files, allowed, left_out):
                raise AssertionError(f"branch {branch} holds a part of the upload: {sorted(files)}")


def _is_one_of(files: Files, allowed: Sequence[Files], left_out: Collection[str]) -> bool:
    """Returns whether files are a repository's, whatever some of them hold."""

    def rest(of: Files) -> Files:
        return {name: "" if name in left_out else data for name, data in of.items()}

    return rest(files) in map(rest, allowed)


CLASS = command_class(make_sources, mutate, exercise, refusals=())
