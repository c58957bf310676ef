"""The page as a file: it names nothing outside of itself, and only its own script may run."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from mlx_mmfree.server.page import page_headers, page_text

_MOST_LINES = 500


class _Page(HTMLParser):
    """Collects the attributes of all elements, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in self.texts:
            self.texts[self._tag].append(data)


@pytest.fixture
def parsed() -> _Page:
    page = _Page()
    page.feed(page_text())
    return page


@pytest.mark.parametrize("tag", ["script", "style"])
def test_the_policy_knows_the_one_script_and_style(parsed: _Page, tag: str) -> None:
    [text] = parsed.texts[tag]
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in page_headers()["Content-Security-Policy"]


def test_the_policy_allows_nothing_else() -> None:
    policy = page_headers()["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"unsafe|\*|https?:", policy)


def test_nothing_is_loaded_from_elsewhere(parsed: _Page) -> None:
    sources = [value for name, value in parsed.attributes if name in ("src", "href", "action")]
    assert [source for source in sources if not source.startswith("data:")] == []
    [style] = parsed.texts["style"]
    assert "url(" not in style and "@import" not in style


def test_no_event_or_style_is_an_attribute(parsed: _Page) -> None:
    assert [name for name, _ in parsed.attributes if name.startswith("on") or name == "style"] == []


def test_text_does_not_become_html(parsed: _Page) -> None:
    [script] = parsed.texts["script"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_the_page_is_small() -> None:
    assert page_text().count("\n") < _MOST_LINES
