"""What the library's pictures share: colours, the placing of labels, and writing a file as a whole."""

import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..files.writing import new_file

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito (2008), which can be told apart with any kind of colour vision."""

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", " ": "␣"}
_DIRECTIONS = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1.4), (1.6, 0), (0, -1.4), (-1.6, 0))


def save_picture(figure: Any, file: Path) -> None:
    """Writes a matplotlib figure as a PNG file, which is replaced as a whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with new_file(file) as new, new.open("wb") as target:
        FigureCanvasAgg(figure).print_png(target)


def visible(character: str) -> str:
    """A character as it is shown in a picture: an escape if it has no shape in the font."""
    if character in _NAMED:
        return _NAMED[character]
    category = unicodedata.category(character)
    if character.isascii() and category[0] != "C":
        return character
    if category[0] in "CMZ" or ord(character) not in _glyphs():
        return f"\\u{ord(character):x}"
    return character


@cache
def _glyphs() -> Mapping[int, int]:
    """The characters of the font of labels."""
    from matplotlib.font_manager import findfont, get_font

    glyphs: Mapping[int, int] = get_font(findfont("DejaVu Sans")).get_charmap()
    return glyphs


def label_points(axes: Any, points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Writes a label beside each point, so that it covers no point and no other label.

    A line joins a label to its point if there is no free place nearby.

    Args:
        axes: The matplotlib axes, whose limits and scales must be set before.
        points: The points, in the units of the axes.
        labels: A short text for each point.
    """
    places = [tuple(axes.transData.transform(point)) for point in points]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for point, (x, y), label in zip(points, places, labels, strict=True):
        text = axes.annotate(
            label,
            point,
            xytext=(0, 0),
            textcoords="offset pixels",
            ha="center",
            va="center",
            fontsize="x-small",
        )
        extent = text.get_window_extent()
        width, height = extent.width, extent.height
        for distance in range(10, 200, 5):
            spots = [
                (x + distance * right - width / 2, y + distance * up - height / 2)
                for right, up in _DIRECTIONS
            ]
            boxes = [(left, low, left + width, low + height) for left, low in spots]
            free = [box for box in boxes if not any(_overlap(box, other) for other in taken)]
            if free:
                break
        box = free[0] if free else boxes[0]
        taken.append(box)
        place = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        text.set_position((place[0] - x, place[1] - y))
        if distance > 20:
            ends = axes.transData.inverted().transform([place, (x, y)])
            axes.plot(*ends.T, color="0.6", linewidth=0.5, zorder=0)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
