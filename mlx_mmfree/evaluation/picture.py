"""The common parts of the library's pictures: colours, characters, and writing a file as a whole."""

import unicodedata
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..files.writing import new_file

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito (2008), which can be told apart with any kind of colour vision."""

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", " ": "␣"}


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
