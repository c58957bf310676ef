"""The fixed parts of a calibration: its layers, its windows and how these are trained."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from ...hub.checkpoint.parameter_reader import ParameterReader
from ...layers.matrix import matrices
from ...models import Block
from ..precision import compute_dtype
from ..run_settings import LoopSettings
from .layers import LayerFiles
from .modulation import Modulation
from .settings import CalibrateSettings
from .window import Window


class Course:
    """The windows of a run.

    Args:
        settings: The run.
        reader: The dense model.
        rank: Of the change of the weights, as of `Modulation`.

    Attributes:
        layers: The dense layers.
        windows: The layers of each window.
        modulation: What is learned of each linear.
        compute_dtype: What is computed in.
        stream_dtype: What the streams are kept in.

    Raises:
        TrainingError: The model cannot be made ternary in this way, or a setting is wrong.
    """

    def __init__(self, settings: CalibrateSettings, reader: ParameterReader, rank: int | None):
        self.settings = settings
        self.layers = LayerFiles(reader, settings.group_size)
        count = len(self.layers.model.blocks)
        settings.check(
            "dense_last", settings.dense_last < count, f"less than the {count} layers of the model"
        )
        self.windows = settings.windows(count)
        self.compute_dtype = compute_dtype(settings.dtype)
        stored = reader.activation_dtype
        is_narrow = stored.size == 2
        self.modulation = Modulation(
            settings.group_size,
            rank,
            "kept" if settings.start == "kept" else "mean",
            stored if is_narrow else mx.float16,
        )
        self.stream_dtype = mx.bfloat16 if is_narrow else mx.float32

    @cached_property
    def paths(self) -> list[str]:
        """The paths of the linears that become ternary."""
        layers = range(self.windows[-1].stop)
        return [f"blocks.{n}.{name}" for n in layers for name in self.layers.linears[n]]

    def stops(self, kind: str) -> list[int]:
        """The layers before which a stream stops, so that only some are in memory for the next stop."""
        windows, layers = self.windows, len(self.layers.model.blocks)
        found = {window.start for window in windows} | {windows[-1].stop, layers}
        if kind == "dense":
            found |= {window.stop for window in windows}
        tail = range(windows[-1].stop, layers, self.settings.window)
        return sorted(found | set(tail))

    def window(
        self, number: int, blocks: Sequence[Block], arguments: Sequence[dict[str, mx.array]]
    ) -> Window:
        """The window of a number, as it begins.

        Args:
            number: Of the window.
            blocks: Its blocks, with dense weights.
            arguments: What each block of the model is given beside the stream.
        """
        layers, key = self.windows[number], mx.random.key(self.settings.seed)
        return Window(
            blocks,
            [self.layers.linears[layer] for layer in layers],
            [arguments[layer] for layer in layers],
            self.modulation,
            mx.random.split(key, number + 2)[number],
            recomputes=self.settings.grad_checkpoint,
        )

    def loop(self) -> LoopSettings:
        """The settings of the loop of a window."""
        settings, dtype = self.settings, self.compute_dtype
        return LoopSettings(
            Path(self.settings.output),
            settings.steps,
            settings.seed,
            settings.clip_norm,
            dtype=None if dtype == mx.float32 else dtype,
        )

    def weights(self, layers: Sequence[int]) -> int:
        """The weights of the linears of some layers that become ternary."""
        found = 0
        for layer in layers:
            modules = matrices(self.layers.model.blocks[layer])
            for name in self.layers.linears[layer]:
                found += modules[name].input_dims * modules[name].output_dims
        return found

    @property
    def largest(self) -> int:
        """The number of the window with the most weights."""
        return max(range(len(self.windows)), key=lambda number: self.weights(self.windows[number]))
