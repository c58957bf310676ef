"""`mmfree convert` of damaged and odd folders to targets that exist, are links, or are the source."""

import random
import shutil
from pathlib import Path

from mlx_mmfree.hub import load_model
from tests.fuzz.base_model import BASES, make_base
from tests.fuzz.case import OUTSIDE, SECRET, command_class
from tests.fuzz.classes import checkpoints, gguf, links, model_cards, pytorch
from tests.fuzz.commands import CommandRefused, apart, contents, run

_SOURCES = {"safetensors": checkpoints, "gguf": gguf, "torch": pytorch}
_TARGETS = ("new", "new", "new", "filled", "checkpoint", "file", "link", "source", "inside", "odd")


def make_sources(folder: Path) -> None:
    """The sources of three other classes, and sound models."""
    for name, module in _SOURCES.items():
        module.make_sources(folder / name)
    for base in BASES:
        make_base(folder / "sound" / base, base)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Makes a source, mostly sound, and a target."""
    kind = rng.choice(("sound", "sound", "links", "card", *_SOURCES))
    target.mkdir()
    if kind in _SOURCES:
        what = _damage(kind, sources, target, rng.random())
    else:
        source = rng.choice(sorted((sources / "sound").iterdir()))
        what = source.name
        if kind == "links":
            links.CLASS.mutate(source, target / "linked", rng)
            (target / "linked" / "model").rename(target / "source")
        else:
            shutil.copytree(source, target / "source")
        if kind == "card":
            what += model_cards.CLASS.mutate(sources, target / "card", rng)
            for file in (target / "card").iterdir():
                file.rename(target / "source" / file.name)
    state = rng.choice(_TARGETS)
    _make_target(target, state, sources)
    (target / "state").write_text(state)
    return f"{kind} to {state}: {what}"


def _damage(kind: str, sources: Path, target: Path, seed: float) -> str:
    """Damages one of the sources in a child, since some of the damage is computed by MLX."""

    def damage() -> None:
        rng = random.Random(seed)
        what.write_text(_SOURCES[kind].CLASS.mutate(sources / kind, target / "source", rng))

    what = target / "what.txt"
    apart(damage, target)
    return what.read_text()


def _make_target(folder: Path, state: str, sources: Path) -> None:
    target = folder / "target"
    if state in ("filled", "checkpoint"):
        if state == "checkpoint":
            shutil.copytree(sources / "sound" / "llama", target)
        target.mkdir(exist_ok=True)
        (target / "mine.txt").write_text("mine")
    elif state == "file":
        target.write_text("mine")
    elif state == "link":
        target.symlink_to(folder.parent / OUTSIDE)


def exercise(folder: Path, rng: random.Random) -> None:
    """Converts; a refused conversion changes nothing, another writes a folder that loads."""
    source = folder / "source"
    ggufs = sorted(source.glob("*.gguf"))
    state = (folder / "state").read_text()
    target = {
        "source": source,
        "inside": source / "inside",
        "odd": folder / "t\u00e4rget \U0001f600 --x [1;2]",
    }.get(state, folder / "target")
    arguments = [
        "convert",
        "--model",
        str(ggufs[0] if ggufs else source),
        "--mlx-path",
        str(target),
    ]
    format = rng.choice(("mlx", "mlx", "hf", "gguf"))
    arguments += ["--to", format] + ["--overwrite"] * (rng.random() < 0.5)
    arguments += rng.choice(
        ([], [], ["--dtype", "bfloat16"], ["--embed-bits", "4"], ["--no-verify"])
    )
    printed = folder / "printed"
    printed.mkdir()
    before = {name: value for name, value in contents(folder).items() if "printed" not in name}
    try:
        run(arguments, printed)
    except CommandRefused:
        after = {name: value for name, value in contents(folder).items() if "printed" not in name}
        if after != before:
            changed = sorted(
                name for name in before.keys() | after if before.get(name) != after.get(name)
            )
            raise AssertionError(f"{arguments} was refused but changed {changed[:5]}") from None
        raise
    written = contents(target)
    for name, value in written.items():
        if isinstance(value, str) or SECRET.encode() in value:
            raise AssertionError(f"{arguments}: {name} holds what lies outside")
    if state in ("filled", "checkpoint") and "mine.txt" not in written:
        raise AssertionError(f"{arguments} removed a file that it had not written")
    if state in ("source", "inside", "file"):
        raise AssertionError(f"{arguments} wrote over its source or a file")
    if format == "mlx":
        load_model(target)


CLASS = command_class(make_sources, mutate, exercise, stays_until_exit="mlx_mmfree-.*")
