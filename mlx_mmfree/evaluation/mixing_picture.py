"""The picture of the weights by which the layers of a model mix a text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .mixing_maps import LayerMaps, Panel
from .picture import save_picture, visible

_LABEL = 12
"""The most characters of a token's label."""

# inches
_PER_TOKEN, _LEAST_SIDE, _MOST_WIDTH, _MOST_HEIGHT = 0.1, 1.7, 26.0, 120.0
_LEFT, _GAP, _BAR, _HEADING, _TITLE, _LABELS = 1.5, 0.2, 1.2, 0.6, 0.5, 0.85


def draw_maps(
    maps: Sequence[LayerMaps], labels: Mapping[str, Sequence[str]], title: str, image: Path
) -> bool:
    """Draws maps as PNG, each mixer a row of panels.

    Args:
        maps: Those with panels.
        labels: The tokens of each text that they name.
        title: The heading.
        image: The file.

    Returns:
        `False` without matplotlib.
    """
    try:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError:
        return False
    columns = max(len(layer.panels) for layer in maps)
    longest = max(len(labels[layer.rows]) for layer in maps)
    side = min(
        max(_LEAST_SIDE, _PER_TOKEN * longest), _MOST_WIDTH / columns, _MOST_HEIGHT / len(maps)
    )
    # labels of columns stand below the last of the rows that share them
    labelled = [
        n == len(maps) - 1 or maps[n + 1].columns != maps[n].columns for n in range(len(maps))
    ]
    width = _LEFT + columns * (side + _GAP) + _BAR
    height = _HEADING + len(maps) * (_TITLE + side) + sum(labelled) * _LABELS
    figure = Figure(figsize=(width, height), dpi=110)
    has_signs = any((panel.weights < 0).any() for layer in maps for panel in layer.panels)
    scale, colours = Normalize(-1 if has_signs else 0, 1), "PuOr" if has_signs else "viridis"
    top = height - _HEADING
    for layer, has_labels in zip(maps, labelled, strict=True):
        top -= _TITLE + side
        for column, panel in enumerate(layer.panels):
            left = _LEFT + column * (side + _GAP)
            axes = figure.add_axes((left / width, top / height, side / width, side / height))
            _draw_panel(axes, panel, cmap=colours, norm=scale)
            _label_axis(axes.yaxis, None if column else labels[layer.rows], side)
            of_columns = labels[layer.columns] if has_labels and layer.columns else None
            _label_axis(axes.xaxis, of_columns, side, rotation=90)
            if layer.columns is None:
                axes.set_xlabel("projected key", fontsize=7)
        name = f"{layer.name}\n{layer.mixer}"
        middle = (0.3 / width, (top + side / 2) / height)
        figure.text(*middle, name, rotation=90, fontsize=9, ha="center", va="center")
        top -= has_labels * _LABELS
    tall = min(height - _HEADING - _TITLE - _LABELS, 5.0)
    place = ((width - 0.9 * _BAR) / width, (height - _HEADING - _TITLE - tall) / height)
    figure.colorbar(
        ScalarMappable(scale, colours),
        cax=figure.add_axes((*place, 0.15 / width, tall / height)),
        label="weight, over the largest of its panel (white: none)",
    )
    # letters are about half as wide as high, and an inch has 72 points
    size = min(16.0, 6 + width, 125 * width / len(title))
    figure.text(
        0.5, 1 - 0.3 / height, title, fontsize=size, ha="center", va="center", parse_math=False
    )
    save_picture(figure, image)
    return True


def _draw_panel(axes: Any, panel: Panel, **style: Any) -> None:
    largest = float(np.abs(panel.weights).max(initial=0.0))
    # what is not seen stays white
    seen = np.ma.masked_equal(panel.weights / (largest or 1.0), 0.0)
    axes.imshow(seen, interpolation="nearest", aspect="auto", **style)
    axes.set_title(f"{panel.title}\nlargest {largest:.2g}", fontsize=8)


def _label_axis(axis: Any, labels: Sequence[str] | None, side: float, rotation: int = 0) -> None:
    """Writes as many labels as there is room for, in even steps."""
    if labels is None:
        axis.set_ticks([])
        return
    step = max(1, -(-len(labels) // max(1, int(side / 0.1))))
    places = list(range(0, len(labels), step))
    axis.set_ticks(places)
    axis.set_ticklabels(
        [labels[place] for place in places], fontsize=6, rotation=rotation, parse_math=False
    )


def token_label(text: str) -> str:
    """A token as a label: short, with escapes for what has no shape in the picture's font."""
    shown = text.strip(" ▁") or "␣" * len(text) or "''"
    label = "".join(map(visible, shown[: _LABEL + 1]))
    return label if len(label) <= _LABEL else label[: _LABEL - 1] + "…"
