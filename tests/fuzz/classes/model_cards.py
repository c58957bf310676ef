"""Model cards of strangers: front matter, licence files and links, read and written anew."""

import random
import re
from dataclasses import replace
from pathlib import Path

import yaml

from mlx_mmfree.hub.publish.model_card import ModelCard, read_source_card, write_model_card
from tests.fuzz.case import OUTSIDE, SECRET, FuzzClass
from tests.fuzz.hostile import CONTROLS, damage_bytes, odd_entry, odd_text
from tests.fuzz.yaml_grammar import hostile_yaml

_FRONT = (
    "license: mit\nlanguage: [en, de]\ntags: [a, b]\nbase_model: owner/name\n",
    "license: other\nlicense_name: x\nlicense_link: https://example.org\ndatasets: owner/data\n",
    "license: 2024-01-01\ntags: {a: 1}\nbase_model: [../../x, 'a/b', 5, null]\n",
    f'license: "{CONTROLS.encode("unicode_escape").decode()}"\nlanguage: "{"x" * 5000}"\n',
    "license: [mit]\nlicense_name: '---\\n# x'\ntags: ['<script>', '---', \"a\\n---\\nb\"]\n",
    "language: 1e400\ndatasets: [[[]]]\nbase_model: !!binary aGFsbG8=\ntags: 9\n",
)
_BODIES = (
    "# Model\n",
    "",
    "---\nmore: front\n---\n",
    "```\n" * 99,
    "<img src=x onerror=y>",
    "| a |\n" * 999,
)
_LICENSES = ("LICENSE", "LICENSE.md", "NOTICE", "LICENCE-x")
_FENCES = ("---\n", "---\n", "---\n", "--- \r\n", "\ufeff---\n", "----\n", "")


def make_sources(folder: Path) -> None:
    """Makes nothing, since the cards are in this file."""


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes a card and licence files, some of which are links, pipes or folders."""
    target.mkdir()
    front = rng.choice((*_FRONT, hostile_yaml(rng), hostile_yaml(rng), odd_text(rng)))
    if rng.random() < 0.2:
        front += hostile_yaml(rng)
    body = rng.choice((*_BODIES, odd_text(rng)))
    text = rng.choice(_FENCES) + front + rng.choice(_FENCES) + body
    data = text.encode(rng.choice(("utf-8", "utf-8", "utf-16")), "replace")
    if rng.random() < 0.2:
        data = damage_bytes(data, rng)
    (target / "README.md").write_bytes(data)
    what = f"{text[:150]!r}"
    for name in rng.sample(_LICENSES, rng.choice((0, 1, 2))):
        (target / name).write_bytes(rng.choice((b"MIT", b"", rng.randbytes(50))))
    if rng.random() < 0.3:
        file = target / rng.choice(("README.md", *_LICENSES))
        what += "; " + odd_entry(file, target.parent / OUTSIDE / "secret.txt", rng)
    return what


def exercise(folder: Path, rng: random.Random) -> None:
    """Reads the card and writes one beside a converted model: valid, and without foreign text."""
    source = read_source_card(folder)
    written = folder / "written"
    written.mkdir()
    card = ModelCard("me/model", "mlx", "mmfree convert", source=source)
    write_model_card(written, replace(card, base_model=rng.choice((None, "owner/name"))))
    text = (written / "README.md").read_text(encoding="utf-8")
    [_, front, _] = re.split("^---\n", text, maxsplit=2, flags=re.MULTILINE)
    front = yaml.safe_load(front)
    if front["library_name"] != "mlx" or "mlx_mmfree" not in front["tags"]:
        raise AssertionError(f"the card's front matter is {front!r:.200}")
    for file in written.iterdir():
        if file.is_symlink() or SECRET in file.read_text(errors="replace"):
            raise AssertionError(f"{file.name} holds what lies outside the source")


CLASS = FuzzClass(make_sources, mutate, exercise)
