"""The weights by which the layers of a model mix a text, as maps that can be drawn."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..layers.context import Context
from ..layers.mixer import State, TokenMixer
from ..models import EncoderDecoder, TokenModel
from ..models.parts.block import Block
from ..models.parts.stack import Stack

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
        name: Its place in the model.
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
