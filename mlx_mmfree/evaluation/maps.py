"""Pictures of what a model looks at: how its layers mix a text, and what of an image makes a class."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..layers.context import Context
from ..layers.mixer import State, TokenMixer
from ..models import EncoderDecoder, ImageClassifier, TokenModel
from ..models.parts.block import Block
from ..models.parts.stack import Stack
from .picture import save_picture, visible

CHANNEL_GROUPS = 4
"""Groups in which channels are shown that have weights of their own."""


class Panel(NamedTuple):
    """One map.

    Attributes:
        title: The head, or the channels.
        weights: float32 `(L, N)`.
    """

    title: str
    weights: np.ndarray


class LayerMaps(NamedTuple):
    """The maps of one token mixer.

    Attributes:
        name: Its path in the model.
        mixer: Its class.
        rows: The tokens whose results are made, of a text or "source" and "target".
        columns: The tokens whose values are weighted; `None`: they are no tokens.
        panels: Its maps; empty where it has none.
        reason: Why it has none, in a line.
        heads: How many heads or groups of channels it has, whether shown or not.
    """

    name: str
    mixer: str
    rows: str
    columns: str | None
    panels: tuple[Panel, ...]
    reason: str = ""
    heads: int = 0


def text_maps(
    model: TokenModel, tokens: Sequence[int], layers: Collection[int], heads: Collection[int] | None
) -> list[LayerMaps]:
    """The maps of a model that reads one text.

    Args:
        model: A model that is no `EncoderDecoder`.
        tokens: The text.
        layers: The layers that are looked at.
        heads: The heads; `None`: all.
    """
    recorder = _Recorder(layers, heads, "layer", "text")
    with recorder.listening(model):
        mx.eval(model.predictions(mx.array([tokens])))
    return recorder.found


def pair_maps(
    model: EncoderDecoder,
    source: Sequence[int],
    target: Sequence[int],
    layers: Collection[int],
    heads: Collection[int] | None,
) -> list[LayerMaps]:
    """The maps of an encoder-decoder that reads a source and writes a target.

    Args:
        model: The model.
        source: Tokens of the source.
        target: Tokens of the target as the decoder reads them; none: the encoder alone is looked at.
        layers: The layers of encoder and decoder that are looked at.
        heads: The heads; `None`: all.
    """
    encoder = _Recorder(layers, heads, "encoder", "source")
    decoder = _Recorder(layers, heads, "decoder", "target")
    with encoder.listening(model.encoder), decoder.listening(model):
        memory = model.encode(mx.array([source]))
        mx.eval(memory)
        if target:
            mx.eval(model.decode(mx.array([target]), memory)[0])
    return encoder.found + decoder.found


class _Recorder:
    """Notes the weights of blocks while they are called.

    Args:
        layers: Numbers of the blocks.
        heads: Numbers of the heads, or all.
        name: What a block is called.
        text: The text that the blocks read.
    """

    def __init__(
        self, layers: Collection[int], heads: Collection[int] | None, name: str, text: str
    ):
        self._layers, self._heads = layers, heads
        self._name, self._text = name, text
        self.found: list[LayerMaps] = []

    @contextmanager
    def listening(self, stack: Stack) -> Iterator[None]:
        """Notes what the blocks of a stack do inside the `with` block."""
        run = stack.run_block
        numbers = {id(block): number for number, block in enumerate(stack.blocks)}

        def noted(
            block: Block, x: mx.array, state: State, context: Context, **arguments: Any
        ) -> tuple[mx.array, State]:
            number = numbers[id(block)]
            if number in self._layers:
                weights = block.mixing_weights(x, state, context, **arguments)
                for kind, of_mixer in weights.items():
                    self._note(number, kind, block[f"{kind}_mixer"], of_mixer)
            if run is None:
                return block(x, state, context, **arguments)
            return run(block, x, state, context, **arguments)

        stack.run_block = noted
        try:
            yield
        finally:
            stack.run_block = run

    def _note(
        self, number: int, kind: str, mixer: TokenMixer, weights: Callable[[], mx.array]
    ) -> None:
        of_memory = kind == "memory"
        name = f"{self._name} {number}" + (", source" if of_memory else "")
        columns: str | None = "source" if of_memory else self._text
        panels: tuple[Panel, ...] = ()
        reason, count = "", 0
        try:
            maps = np.array(weights()[0].astype(mx.float32))
        except ValueError as error:
            reason = str(error)
        else:
            if mixer.weighs_channels:
                panels, count = _grouped(maps), CHANNEL_GROUPS
            else:
                count = len(maps)
                shown = range(count) if self._heads is None else sorted(self._heads)
                panels = tuple(Panel(f"head {n}", maps[n]) for n in shown if n < count)
            is_square = maps.shape[-1] == maps.shape[-2]
            columns = columns if is_square or of_memory else None
        kind_name = type(mixer).__name__
        self.found.append(LayerMaps(name, kind_name, self._text, columns, panels, reason, count))


def _grouped(maps: np.ndarray) -> tuple[Panel, ...]:
    """The mean weights of channels `(E, L, N)`, of those with short and with long memory apart."""
    size = np.abs(maps)
    distance = np.abs(np.arange(maps.shape[1])[:, None] - np.arange(maps.shape[2]))
    reach = (size * distance).sum(axis=(1, 2)) / np.maximum(size.sum(axis=(1, 2)), 1e-30)
    groups = np.array_split(np.argsort(reach, kind="stable"), min(CHANNEL_GROUPS, len(maps)))
    return tuple(
        Panel(
            f"{len(group)} channels, reach {reach[group].mean():.1f} tokens",
            maps[group].mean(axis=0),
        )
        for group in groups
    )


_LABEL = 12
"""The most characters of a token's label."""

# inches
_PER_TOKEN, _LEAST_SIDE, _MOST_WIDTH, _MOST_HEIGHT = 0.1, 1.7, 26.0, 120.0
_LEFT, _GAP, _BAR, _HEADING, _TITLE, _LABELS = 1.5, 0.2, 1.2, 0.6, 0.5, 0.85


def draw_maps(
    maps: Sequence[LayerMaps], labels: Mapping[str, Sequence[str]], title: str, image: Path
) -> None:
    """Draws maps as PNG, each mixer a row of panels.

    Args:
        maps: Those with panels.
        labels: The tokens of each text that they name.
        title: The heading.
        image: The file.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

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
    corner = ((width - 0.9 * _BAR) / width, (height - _HEADING - _TITLE - tall) / height)
    figure.colorbar(
        ScalarMappable(scale, colours),
        cax=figure.add_axes((*corner, 0.15 / width, tall / height)),
        label="weight, over the largest of its panel (white: none)",
    )
    # letters are about half as wide as high, and an inch has 72 points
    size = min(16.0, 6 + width, 125 * width / len(title))
    figure.text(
        0.5, 1 - 0.3 / height, title, fontsize=size, ha="center", va="center", parse_math=False
    )
    save_picture(figure, image)


def _draw_panel(axes: Any, panel: Panel, **style: Any) -> None:
    largest = float(np.abs(panel.weights).max(initial=0.0))
    # what is not seen stays white
    seen = np.ma.masked_equal(panel.weights / (largest or 1.0), 0.0)
    axes.imshow(seen, interpolation="nearest", aspect="auto", **style)
    axes.set_title(f"{panel.title}\nlargest {largest:.2g}", fontsize=8)


def _label_axis(axis: Any, labels: Sequence[str] | None, side: float, rotation: int = 0) -> None:
    """Writes as many labels as there is space for, in even steps."""
    if labels is None:
        axis.set_ticks([])
        return
    step = max(1, -(-len(labels) // max(1, int(side / 0.1))))
    ticks = list(range(0, len(labels), step))
    axis.set_ticks(ticks)
    axis.set_ticklabels(
        [labels[tick] for tick in ticks], fontsize=6, rotation=rotation, parse_math=False
    )


def token_label(text: str) -> str:
    """A token as a label: short, with escapes for what has no shape in the picture's font."""
    shown = text.strip(" ▁") or "␣" * len(text) or "''"
    label = "".join(map(visible, shown[: _LABEL + 1]))
    return label if len(label) <= _LABEL else label[: _LABEL - 1] + "…"


def class_maps(
    model: ImageClassifier, images: mx.array, classes: Sequence[int] | None = None
) -> np.ndarray:
    r"""Maps of a class by Grad-CAM (Selvaraju et al., arXiv 1610.02391).

    .. math::
        M_p = \mathrm{ReLU}\Big(\sum_k \alpha_k A_{pk}\Big), \quad
        \alpha_k = \frac{1}{N} \sum_p \frac{\partial y_c}{\partial A_{pk}}

    with the logit :math:`y_c` of the class and, as :math:`A`, the vectors of all positions that enter
    the model's last block. There, unlike after it, the positions of a model with a class token still act
    on the logits; so the maps of all models mean the same.

    Args:
        model: In evaluation.
        images: What the model reads, `(B, H, W, C)`.
        classes: A class for each image; `None`: the likeliest one.

    Returns:
        float32 `(B, H', W')` from 0 to 1, each map over its largest value; 0 throughout where no
        position speaks for the class.

    Raises:
        UnsupportedModelError: The model has no classes.
        ValueError: The model does not tell the rows and columns of its positions, its blocks belong to a
            text model, or there is not one class for each image.
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
    gradient = _positions(model, mx.grad(score)(x), size).astype(mx.float32)
    weights = gradient.mean(axis=(1, 2), keepdims=True)
    maps = np.array(mx.maximum((weights * _positions(model, x, size)).sum(axis=-1), 0.0))
    return maps / np.maximum(maps.max(axis=(1, 2), keepdims=True), np.finfo(np.float32).tiny)


def _positions(model: ImageClassifier, x: mx.array, image_size: tuple[int, int]) -> mx.array:
    """Vectors of positions as a map `(B, H', W', D)`, without tokens that stand before them."""
    if x.ndim == 4:
        return x
    grid_of = getattr(model.embed, "grid_of", None)
    if grid_of is None:
        raise ValueError(
            "[class_maps] 'model' must keep its positions in rows and columns, or tell their number by "
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
            box = (left / width, bottom / height, _SIDE / width, high / height)
            axes = figure.add_axes(box)
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
    """A map that is interpolated linearly between the middles of its positions."""
    from PIL import Image

    finer = -(-_FINE // min(shape[:2]))
    size = (finer * shape[1], finer * shape[0])
    picture = Image.fromarray(values.astype(np.float32))
    return np.asarray(picture.resize(size, Image.Resampling.BILINEAR))


def _grey(view: np.ndarray) -> np.ndarray:
    return view if view.ndim == 2 else view.mean(axis=-1)
