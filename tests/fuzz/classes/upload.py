"""`mmfree upload` of odd folders to a Hub that fails now and then."""

import random
import shutil
from pathlib import Path

from mlx_mmfree.hub.publish.model_card import CARD_FILE
from tests.fuzz.case import SECRET, FuzzClass
from tests.fuzz.classes import links
from tests.fuzz.commands import run
from tests.fuzz.hub_process import HubProcess, log_in
from tests.hub.hub_server import TOKEN

_SECRETS = (".env", ".git/config", "token.log", "model.safetensors.tmp")
_REPOSITORIES = (*["me/model"] * 6, "me/gated", "me/broken", "other/model", "me/a b")
_ODD_FILES = ("notes *[a].txt", "\u00e4\U0001f600.txt", "-x.txt", "a.py", "x" * 200 + ".txt")


def make_sources(folder: Path) -> None:
    """A model with a card."""
    links.make_sources(folder)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Adds odd entries, hidden files and files with odd names to a model folder."""
    what = "sound"
    if rng.random() < 0.35:
        what = links.CLASS.mutate(sources, target, rng)
    else:
        shutil.copytree(sources, target / "model")
    for name in rng.sample(_SECRETS, 2):
        file = target / "model" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(SECRET)
    for name in rng.sample(_ODD_FILES, rng.choice((0, 1, 2))):
        (target / "model" / name).write_text(rng.choice(("", "a", "x" * 6000)))
        what += f"; {name[:20]}"
    card = target / "model" / CARD_FILE
    if rng.random() < 0.3 and not card.is_dir():
        card.unlink(missing_ok=True)
    return what


def exercise(folder: Path, rng: random.Random) -> None:
    """Uploads; the Hub may get files of the folder only, and the login is not shown."""
    printed = folder / "printed"
    printed.mkdir()
    repository = rng.choice(_REPOSITORIES)
    arguments = ["upload", "--path", str(folder / "model"), "--upload-repo", repository]
    arguments += rng.choice(
        ([], [], ["--private"], ["--revision", "next"], ["--message", "x\n--y"])
    )
    token = rng.choice((*[TOKEN] * 6, "hf_wrong", "hf_\x1b[2Jwrong", ""))
    try:
        with HubProcess(folder) as hub:
            text = run(arguments, printed, log_in(hub.url, token))
            repositories = hub.repositories()
    finally:
        shown = "".join(file.read_text(errors="replace") for file in printed.iterdir())
        if token and token in shown:
            raise AssertionError(f"the login is shown: {shown[:500]!r}")
    files = {
        name: content
        for repository in repositories.values()
        for branch in repository.branches.values()
        for name, content in branch.items()
    }
    if not files or any(SECRET.encode() in content for content in files.values()):
        raise AssertionError(f"the Hub got {sorted(files)}: {text[:300]}")
    for name, content in files.items():
        sent = folder / "model" / name
        # a folder without a card gets one on the Hub
        if name == CARD_FILE and not sent.exists():
            continue
        if sent.read_bytes() != content:
            raise AssertionError(f"{name} arrived as something else")


CLASS = FuzzClass(
    make_sources,
    mutate,
    exercise,
    cpu_seconds=30,
    wall_seconds=200,
    batch=1,
    is_command=True,
)
