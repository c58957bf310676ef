"""Downloads killed at any moment and started again."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants

from tests.fuzz.base_model import make_base
from tests.fuzz.case import command_class
from tests.fuzz.commands import apart, contents, run, start
from tests.fuzz.hub_process import HubProcess, log_in
from tests.hub.hub_server import TOKEN

_REPOSITORY = "me/model"
_ARGUMENTS = (
    *("generate", "--model", _REPOSITORY, "--prompt", "a b", "--max-tokens", "2", "--seed", "1"),
    *("--verbose", "F"),
)


def _prepare(url: str, home: Path) -> Callable[[], None]:
    """Makes a child download into a cache of its own."""
    use = log_in(url, TOKEN)

    def prepare() -> None:
        use()
        constants.HF_HUB_CACHE = str(home)

    return prepare


def make_sources(folder: Path) -> None:
    """A model, what is written with it, and how long a download takes that nobody kills."""
    apart(lambda: make_base(folder / "model", "hgrn"), folder)
    with HubProcess(folder, {_REPOSITORY: folder / "model"}) as hub:
        started = time.monotonic()
        text = run(_ARGUMENTS, folder, _prepare(hub.url, folder / "cache"))
        seconds = time.monotonic() - started
    (folder / "plan.json").write_text(json.dumps([seconds, _written(text)]))


def _written(text: str) -> str:
    """The text that was printed after the bars of progress."""
    return text.rstrip("\n").rpartition("\n")[2]


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Chooses the moments of the deaths."""
    target.mkdir()
    seconds, text = json.loads((sources / "plan.json").read_text())
    delays = [rng.uniform(0, 1.1) * seconds for _ in range(rng.choice((1, 1, 2, 3)))]
    (target / "model").symlink_to(sources / "model")
    (target / "plan.json").write_text(json.dumps([delays, text]))
    return f"killed after {delays}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Kills, and downloads to the end: the cache holds the whole model, and nothing else."""
    delays, text = json.loads((folder / "plan.json").read_text())
    model = contents((folder / "model").resolve())
    printed, cache = folder / "printed", folder / "cache"
    printed.mkdir()
    with HubProcess(folder, {_REPOSITORY: (folder / "model").resolve()}) as hub:
        prepare = _prepare(hub.url, cache)
        for delay in delays:
            start(_ARGUMENTS, printed, prepare).kill(delay)
            _check(cache, model, is_whole=False)
        found = _written(run(_ARGUMENTS, printed, prepare))
    if found != text:
        raise AssertionError(f"the model of the second download writes {found!r}")
    _check(cache, model, is_whole=True)


def _check(cache: Path, model: dict[str, bytes | str], *, is_whole: bool) -> None:
    """A file under its name is the file of the Hub, and nothing is left of parts in the end."""
    repository = cache / f"models--{_REPOSITORY.replace('/', '--')}"
    found = {}
    for snapshot in repository.glob("snapshots/*"):
        for path in snapshot.rglob("*"):
            found[str(path.relative_to(snapshot))] = path.read_bytes()
    if wrong := [name for name, data in found.items() if data != model.get(name)]:
        raise AssertionError(f"the cache holds other files than the Hub: {wrong}")
    if is_whole:
        parts = [str(path) for path in repository.rglob("*.incomplete")]
        if parts or found.keys() != model.keys():
            raise AssertionError(f"the cache holds {sorted(found)} and parts {parts}")


CLASS = command_class(make_sources, mutate, exercise, refusals=())
