"""The picture of the maps of classes, drawn over the images."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .picture import save_picture, visible

_MOST_COLUMNS = 3
_HEADING_LETTERS = 60
_FINE = 224
"""Pixels of the shorter side of a smooth map, at least."""

# inches
_SIDE, _HEADING, _GAP, _BAR = 2.2, 0.45, 0.12, 0.85


def draw_class_maps(
    views: Sequence[Any], maps: Sequence[np.ndarray], titles: Sequence[str], image: Path
) -> None:
    """Draws as PNG each image, and beside it its map over the same image in grey; several as a grid.

    Args:
        views: What the model sees of each image: pictures of Pillow, or arrays `(H, W)`, `(H, W, 3)`.
        maps: Of values from 0 to 1.
        titles: What stands above each image.
        image: The file.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    shape = np.asarray(views[0]).shape
    high = _SIDE * shape[0] / shape[1]
    columns = min(_MOST_COLUMNS, math.ceil(math.sqrt(len(views))))
    rows = math.ceil(len(views) / columns)
    pair = 2 * _SIDE + 3 * _GAP
    width, height = columns * pair + _BAR, rows * (high + _HEADING) + _GAP
    figure = Figure(figsize=(width, height), dpi=110)
    scale, colours = Normalize(0, 1), "inferno"
    for number, (view, values, title) in enumerate(zip(views, maps, titles, strict=True)):
        row, column = divmod(number, columns)
        bottom = height - (row + 1) * (high + _HEADING)
        for half in range(2):
            left = column * pair + _GAP + half * (_SIDE + _GAP)
            place = (left / width, bottom / height, _SIDE / width, high / height)
            axes = figure.add_axes(place)
            axes.set_axis_off()
            extent = (0, shape[1], shape[0], 0)
            pixels = _grey(np.asarray(view)) if half else np.asarray(view)
            axes.imshow(pixels, extent=extent, cmap="gray", vmin=0, vmax=255)
            if half:
                smooth = _smooth(values, shape)
                alpha = 0.35 + 0.4 * smooth
                axes.imshow(smooth, extent=extent, cmap=colours, norm=scale, alpha=alpha)
        middle = (column + 0.5) * pair / width
        figure.text(
            middle,
            (bottom + high + 0.5 * _HEADING) / height,
            _heading(title),
            fontsize=9,
            ha="center",
            va="center",
            parse_math=False,
        )
    figure.colorbar(
        ScalarMappable(scale, colours),
        cax=figure.add_axes(
            ((width - _BAR + _GAP) / width, _GAP / height, 0.13 / width, high / height)
        ),
        label="over the largest of a map",
    )
    save_picture(figure, image)


def _heading(title: str) -> str:
    text = "".join(character if character == " " else visible(character) for character in title)
    return text if len(text) <= _HEADING_LETTERS else f"{text[: _HEADING_LETTERS - 1]}…"


def _smooth(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A map that is interpolated linearly between the middles of its places."""
    from PIL import Image

    finer = -(-_FINE // min(shape[:2]))
    size = (finer * shape[1], finer * shape[0])
    places = Image.fromarray(values.astype(np.float32))
    return np.asarray(places.resize(size, Image.Resampling.BILINEAR))


def _grey(view: np.ndarray) -> np.ndarray:
    return view if view.ndim == 2 else view.mean(axis=-1)
