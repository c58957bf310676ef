"""Where in an image a model sees a class, as maps and as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..models import ImageClassifier
from .picture import save_picture, visible


def class_maps(
    model: ImageClassifier, images: mx.array, classes: Sequence[int] | None = None
) -> np.ndarray:
    r"""Maps of a class by Grad-CAM (Selvaraju et al., arXiv 1610.02391).

    .. math::
        M_p = \mathrm{ReLU}\Big(\sum_k \alpha_k A_{pk}\Big), \quad
        \alpha_k = \frac{1}{N} \sum_p \frac{\partial y_c}{\partial A_{pk}}

    with the logit :math:`y_c` of the class and, as :math:`A`, the vectors of all places that enter the
    model's last block. There, unlike behind it, the places of a model with a class token still act on
    the logits; so the maps of all models mean the same.

    Args:
        model: In evaluation.
        images: What the model reads, `(B, H, W, C)`.
        classes: A class for each image; `None`: the likeliest one.

    Returns:
        float32 `(B, H', W')` from 0 to 1, each map over its largest value; 0 throughout where no place
        speaks for the class.

    Raises:
        UnsupportedModelError: The model has no classes.
        ValueError: The model does not tell the rows and columns of its places, its blocks are those of a
            model of texts, or there is not one class for each image.
    """
    model.check_classes("class_maps")
    x = model.until_last_block(images)
    logits = model.from_last_block(x)
    wanted = mx.argmax(logits, axis=-1) if classes is None else mx.array(list(classes))
    if wanted.shape != logits.shape[:1]:
        raise ValueError(
            f"[class_maps] 'classes' must be one for each of {len(images)} images but got {classes}."
        )

    def score(x: mx.array) -> mx.array:
        logits = model.from_last_block(x).astype(mx.float32)
        return mx.take_along_axis(logits, wanted[:, None], axis=-1).sum()

    size = (images.shape[1], images.shape[2])
    gradient = _places(model, mx.grad(score)(x), size).astype(mx.float32)
    weights = gradient.mean(axis=(1, 2), keepdims=True)
    maps = np.array(mx.maximum((weights * _places(model, x, size)).sum(axis=-1), 0.0))
    return maps / np.maximum(maps.max(axis=(1, 2), keepdims=True), np.finfo(np.float32).tiny)


def _places(model: ImageClassifier, x: mx.array, image_size: tuple[int, int]) -> mx.array:
    """Vectors of places as a map `(B, H', W', D)`, without tokens that stand before them."""
    if x.ndim == 4:
        return x
    grid_of = getattr(model.embed, "grid_of", None)
    if grid_of is None:
        raise ValueError(
            "[class_maps] 'model' must keep its places in rows and columns, or tell their number by "
            f"'grid_of' of its embedding, but {type(model.embed).__name__} does not."
        )
    rows, columns = grid_of(image_size)
    return x[:, x.shape[1] - rows * columns :].reshape(x.shape[0], rows, columns, x.shape[2])


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
