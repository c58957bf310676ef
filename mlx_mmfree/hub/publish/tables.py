"""Tables of a model card, in Markdown."""

from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with a head, and a line of as many cells for each of `lines`."""
    rule = f"|{'---|' * len(head)}"
    return "\n".join([_line(head), rule, *map(_line, lines)])


def rows(figures: Mapping[str, str]) -> str:
    """A table of names and values."""
    return table(("", ""), figures.items())


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
