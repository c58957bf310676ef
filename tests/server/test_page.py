"""The page as files: they name nothing outside of themselves, and only its own scripts may run."""

import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mlx_mmfree
from mlx_mmfree.server.page import PAGE, PAGE_HEADERS, page_files

_MOST_LINES, _LONGEST_LINE = 400, 120
"""Lines of one file that is the project's own, and characters of a line of a script or style."""
_VENDOR = {
    "vendor/marked.esm.js": (
        "marked v18.2.1",
        "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    ),
    "vendor/highlight.min.js": (
        "Highlight.js v11.12.0",
        "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
    ),
    "vendor/katex.min.js": (
        "0.16.47",
        "a29d2961d3146de5949d78ac7c1a9d93ae54955bad22a6db4fbe836e88e8bf48",
    ),
    "vendor/purify.es.mjs": (
        "DOMPurify 3.4.18",
        "1a06b721ad8b46d6174b21f22ea70290aaf3e5a81d65af3b7178113953f7c9b1",
    ),
}
"""The libraries, byte for byte as their publishers' packages have them."""

TEXTS = {name: content.decode() for name, (content, _) in page_files().items()}
OWN = {name: text for name, text in TEXTS.items() if name not in _VENDOR}
SCRIPTS = {name: text for name, text in OWN.items() if name.endswith(".js")}


class _Page(HTMLParser):
    """Collects the elements, the attributes, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.inline = ""
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style"):
            self.inline += data.strip()


@pytest.fixture
def parsed() -> _Page:
    page = _Page()
    page.feed(TEXTS[PAGE])
    return page


def test_the_policy_allows_nothing_else() -> None:
    policy = dict(
        part.split(" ", 1) for part in PAGE_HEADERS["Content-Security-Policy"].split("; ")
    )
    assert policy.pop("default-src") == "'none'"
    assert Counter(policy.values()) == {
        "'self'": 3,
        "'none'": 3,
        "data:": 1,
        "'script'": 1,
        "dompurify": 1,
    }
    assert not re.search(r"unsafe|\*|https?:", PAGE_HEADERS["Content-Security-Policy"])
    assert PAGE_HEADERS["X-Content-Type-Options"] == "nosniff"


def test_nothing_is_loaded_from_elsewhere(parsed: _Page) -> None:
    loaded = [value for name, value in parsed.attributes if name in ("src", "href", "action")]
    loaded = [f"./{value.removeprefix('page/')}" for value in loaded if value[:5] != "data:"]
    for text in SCRIPTS.values():
        loaded += re.findall(r'^import .* from "(.*)";$', text, re.MULTILINE)
        loaded += re.findall(r'await import\("(.*)"\)', text)
    assert {name.removeprefix("./") for name in loaded} == TEXTS.keys() - {PAGE}
    assert not any(re.search(r"url\(|@import", text) for text in (TEXTS["page.css"],))
    assert not any(re.search(r"https?://", text) for text in SCRIPTS.values())


def test_no_script_or_style_stands_in_the_markup(parsed: _Page) -> None:
    assert parsed.inline == ""
    assert [name for name, _ in parsed.attributes if name.startswith("on") or name == "style"] == []


def test_text_does_not_become_html() -> None:
    makes = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|eval\(|new Function"
    assert [name for name, text in SCRIPTS.items() if re.search(makes, text)] == []


@pytest.mark.parametrize("name", _VENDOR)
def test_libraries_are_as_they_were_published(name: str) -> None:
    version, digest = _VENDOR[name]
    assert hashlib.sha256(page_files()[name][0]).hexdigest() == digest
    assert version in TEXTS[name]
    notice = Path(mlx_mmfree.__file__).parents[1] / "NOTICE"
    number = version.split()[-1].removeprefix("v")
    assert f"{name} " in notice.read_text() and number in notice.read_text()


def test_the_files_are_small() -> None:
    assert {name for name in TEXTS if name.startswith("vendor/")} == _VENDOR.keys()
    lengths = {name: text.count("\n") for name, text in OWN.items()}
    assert {name: length for name, length in lengths.items() if length > _MOST_LINES} == {}
    long = {
        (name, line)
        for name, text in OWN.items()
        for line in text.splitlines()
        if len(line) > _LONGEST_LINE and name != PAGE
    }
    assert long == set()
