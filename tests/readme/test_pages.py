"""Every page is reachable from the main one, begins with something to run, and lists what there is."""

import re
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.readme import api_names
from tests.readme.documents import FOLDERS, MAIN, ROOT, anchors, links

PAGES = [
    MAIN,
    *FOLDERS,
    api_names.PAGE,
    *(ROOT / ".github").rglob("*.md"),
    ROOT / "tests" / "cli" / "mlx_lm_flags.md",
]
FIRST_LINES = 30
"""Within so many lines of a page stands the first thing that can be run."""
SLIP = "mmfree list"
"""The commands of the page on commands that are answered with a suggestion."""
SCREEN = 370
"""Pixels of a page on a telephone: 390 without margins, and by what the estimate of a width is off."""
CHARACTER, MARGINS, CODE = 8.2, 27, 11
"""Pixels of a character, of the margins of a cell, and of code's margins, as GitHub shows them."""


def linked(page: Path) -> Iterator[Path]:
    for link in links(page):
        if not link.startswith(("https://", "http://")):
            path = link.partition("#")[0]
            yield (page.parent / path).resolve() if path else page


def test_every_page_is_reachable_from_the_main_page() -> None:
    seen: set[Path] = set()
    waiting = [MAIN]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            waiting += [target for target in linked(page) if target.suffix == ".md"]
    assert set(PAGES) <= seen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [MAIN, *FOLDERS], ids=lambda page: page.parent.name)
def test_a_page_begins_with_something_to_run(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()[:FIRST_LINES]
    assert any(re.match(r"```(sh|python|py)$", line) for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_commands_in_sentences_exist(page: Path) -> None:
    for span in re.findall(r"`((?:mmfree|python) [^`\n]*)`", page.read_text(encoding="utf-8")):
        program, name, *words = re.sub(r"launch -n \d+ ", "", span).split()
        if program == "python" and re.search(r"/\w+\.py$", name):
            assert (ROOT / name).exists(), span
        elif program == "mmfree" and re.fullmatch("[a-z_]+", name) and span != SLIP:
            parser = import_module(f"mlx_mmfree.cli.{name}").build_parser()
            within = [each.choices for each in parser._actions if isinstance(each.choices, dict)]
            known = {flag for each in within for other in each.values() for flag in flags(other)}
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert used <= known | flags(parser), span


def flags(parser: ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


def narrowest(word_or_code: str) -> float:
    """The least width of a part of a cell, which breaks at spaces, and after hyphens before letters."""
    chunks = re.split(r"\s|(?<=-)(?=[A-Za-z])", word_or_code.strip("`"))
    return CHARACTER * max(map(len, chunks)) + CODE * word_or_code.startswith("`")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def least_width(rows: list[list[str]]) -> float:
    """The width of a table whose words are broken wherever they can be."""
    width = 0.0
    for column in zip(*rows, strict=True):
        shown = [re.sub(r"\[(.*?)\]\([^)]*\)|\*\*", r"\1", cell) for cell in column]
        parts = [part for cell in shown for part in re.findall(r"`[^`]*`|[^`]+", cell)]
        width += MARGINS + max(map(narrowest, parts), default=0)
    return width


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_tables_fit_a_telephone(page: Path) -> None:
    """Tables of the main page fit as they are; others can be scrolled, over three screens at most."""
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = [cells(line) for line in block.splitlines()]
        assert least_width([head, *rows]) <= SCREEN * (1 if page == MAIN else 3), head


def test_list_of_public_names_is_complete() -> None:
    assert api_names.PAGE.read_text(encoding="utf-8") == api_names.text(), (
        "run python -m tests.readme.api_names"
    )
