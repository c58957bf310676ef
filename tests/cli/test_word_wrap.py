"""Lines break between words, however a text is cut into chunks."""

import textwrap

import pytest

from mlx_mmfree.cli.parts.terminal import WordWrap, columns

TEXT = (
    "Once upon a time there was a dog, and the dog was\nold. It said: incomprehensibilities!  So."
)


def laid_out(text: str, width: int, size: int) -> str:
    wrap = WordWrap(width)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    return "".join([*map(wrap.add, chunks), wrap.finish()])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_words_stay_whole(size: int) -> None:
    lines = laid_out(TEXT, 24, size).split("\n")
    assert lines == [
        line
        for part in TEXT.split("\n")
        for line in textwrap.wrap(part, 24, drop_whitespace=True, expand_tabs=False)
    ]


def test_nothing_is_lost_or_added_but_breaks_for_spaces() -> None:
    for width in range(1, 40):
        assert laid_out(TEXT, width, 4).split() == TEXT.split()
    assert laid_out("  if x:\n\treturn\n", 80, 3) == "  if x:\n\treturn\n"


def test_words_without_end_are_shown_as_they_come() -> None:
    wrap = WordWrap(8)
    assert [wrap.add("abcd") for _ in range(4)] == ["", "abcdabcd", "", "abcdabcd"]


def test_scripts_without_spaces_are_not_held_back() -> None:
    wrap = WordWrap(6)
    assert "".join(wrap.add(sign) for sign in "我是一只老狗") == "我是一\n只老狗"
    assert columns("我e\N{COMBINING ACUTE ACCENT}a") == 4
