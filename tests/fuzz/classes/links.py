"""Model folders with links, pipes, folders and devices in place of files, and beside them."""

import os
import random
import shutil
import socket
from pathlib import Path

from mlx_mmfree.hub import load, load_model, save_model
from mlx_mmfree.hub.publish.model_card import ModelCard, read_source_card, write_model_card
from mlx_mmfree.hub.publish.upload import plan_upload
from tests.fuzz.base_model import make_base
from tests.fuzz.case import OUTSIDE, SECRET, FuzzClass
from tests.fuzz.hostile import odd_entry

_NAMES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"),
    *("chat_template.jinja", "generation_config.json", "LICENSE", "special_tokens_map.json"),
    *("tokenizer.model", "added_tokens.json", "ternary_scales.safetensors", "notes.txt", "x.gguf"),
    *("model.safetensors.index.json", "adapter_config.json", "adapters.safetensors", "NOTICE"),
)


def make_sources(folder: Path) -> None:
    """A model with a card and a licence."""
    make_base(folder, "hgrn")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Model\n")
    (folder / "LICENSE").write_text("MIT")


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Puts other kinds of entries into the folder, some of them in place of its files."""
    shutil.copytree(sources, target / "model")
    outside = target.parent / OUTSIDE / "secret.txt"
    what = []
    for name in rng.sample(_NAMES, rng.choice((1, 1, 2, 4))):
        file = target / "model" / name
        kind = rng.random()
        if kind < 0.05:
            file.unlink(missing_ok=True)
            _make_socket(file)
            what.append(f"{name}: socket")
        elif kind < 0.15 and file.exists():
            # a link to a file of the folder does not lead out of it
            file.rename(file.with_name(f"real-{name}"))
            file.symlink_to(f"real-{name}")
            what.append(f"{name}: link within")
        else:
            what.append(odd_entry(file, outside, rng))
    if rng.random() < 0.2:
        folder = target / "model" / rng.choice(("folder", ".hidden", "mlx_model"))
        folder.symlink_to(rng.choice((outside.parent, Path("/proc"), target)))
        what.append(f"{folder.name}: link to a folder")
    return "; ".join(what)


def _make_socket(file: Path) -> None:
    # names of sockets must be short
    before = os.open(".", os.O_RDONLY)
    os.chdir(file.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(file.name)
    os.fchdir(before)
    os.close(before)


def exercise(folder: Path, rng: random.Random) -> None:
    """Loads, saves again, writes a card and plans an upload; nothing from outside may be taken."""
    refused = None
    for use in (_save_again, _plan):
        try:
            use(folder)
        except CLASS.refusals as error:
            refused = error
            if SECRET in str(error):
                raise AssertionError("the message shows what lies outside") from error
    for file in (folder / "written").rglob("*"):
        if file.is_symlink() or (file.is_file() and SECRET.encode() in file.read_bytes()):
            raise AssertionError(f"{file.name} was taken from outside")
    if refused is not None:
        raise refused


def _save_again(folder: Path) -> None:
    source, written = folder / "model", folder / "written"
    card = read_source_card(source)
    load(source)
    save_model(written, load_model(source), source)
    write_model_card(written, ModelCard("me/model", "mlx", "mmfree convert", source=card))


def _plan(folder: Path) -> None:
    plan = plan_upload(folder / "model", "me/model")
    for name in plan.files:
        file = (plan.folder / name).resolve()
        if not file.is_relative_to(plan.folder):
            raise AssertionError(f"{name} would be sent from outside")


CLASS = FuzzClass(make_sources, mutate, exercise)
