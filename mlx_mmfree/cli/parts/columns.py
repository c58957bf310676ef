"""Tables with aligned columns, and sizes as people read them."""

from collections.abc import Iterable, Sequence

from ...platform.units import BYTES_PER_GB

_BAR = 30


def aligned(rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell.

    Args:
        rows: The cells of each row, the heading first.
        left: Number of first columns that are aligned to the left. The others are to the right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, the heading first; numbers stand to the right."""
    heading, *rest = [f"| {' | '.join(row)} |" for row in rows]
    columns = heading.count(" | ")
    return [heading, f"| --- |{' ---: |' * columns}", *rest]


def share_bar(share: float) -> str:
    """A bar as long as a share from 0 to 1."""
    return "█" * round(_BAR * share)


def size_text(nbytes: int) -> str:
    """A number of bytes in kB, MB or GB."""
    if nbytes >= BYTES_PER_GB:
        return f"{nbytes / BYTES_PER_GB:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"
