"""A few layers that learn to give what the same dense layers give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_unflatten

from ...errors import TrainingStopped
from ...layers.matrix import matrices
from ...ops import long_sum
from ...platform.progress import Progress
from ..data_parallel import DataParallel
from ..optimizer import OPTIMIZERS
from ..optimizer_step import OptimizerStep, recomputed
from ..run_settings import LoopSettings
from ..stopping import StopRequest
from .layers import run_blocks
from .modulation import ModulatedLinear, Modulation
from .streams import OpenStream

DELTA = 0.5
"""Where the loss turns from squares to lines, in deviations of the dense layers' result."""

HARD_FROM = 0.8
"""The share of the steps after which trits are hard."""

_SHARPEST = 30.0


@dataclass(frozen=True)
class WindowBatch:
    """The streams of some samples before and after a window.

    Attributes:
        inputs: Before the ternary layers, `(B, L, D)`.
        targets: After the dense ones, `(B, L, D)`.
        deviation: Of the targets of all samples, float32 `()`.
        sharpness: Of the trits, float32 `()`; `None`: they are hard.
    """

    inputs: mx.array
    targets: mx.array
    deviation: mx.array
    sharpness: mx.array | None = None

    @property
    def tokens(self) -> int:
        return self.targets.shape[0] * self.targets.shape[1]

    @property
    def terms(self) -> int:
        return self.tokens


class Window(nn.Module):
    """Layers whose linears are modulated, of which nothing else is learned.

    Args:
        blocks: The blocks, with dense weights. Their linears are replaced.
        linears: By block, the names of the linears that become ternary.
        arguments: What each block is given beside the stream.
        modulation: What is learned.
        key: Of random weights.
        recomputes: Whether blocks are computed again in the backward pass.
    """

    num_logits = 0

    def __init__(
        self,
        blocks: Sequence[Any],
        linears: Sequence[Sequence[str]],
        arguments: Sequence[dict[str, mx.array]],
        modulation: Modulation,
        key: mx.array,
        *,
        recomputes: bool = False,
    ):
        super().__init__()
        self.blocks = list(blocks)
        self._arguments = list(arguments)
        self._run = recomputed if recomputes else None
        for block, names in zip(blocks, linears, strict=True):
            layers = {name: matrix.layer for name, matrix in matrices(block).items()}
            for name in names:
                key, own = mx.random.split(key)
                linear = ModulatedLinear(layers[name], modulation, own)
                block.update_modules(tree_unflatten([(name, linear)]))
        self.freeze()
        for _, linear in self.modulated():
            linear.unfreeze(keys=linear.learned, recurse=False)

    def modulated(self) -> list[tuple[str, ModulatedLinear]]:
        """Its modulated linears by their names."""
        return [(name, m) for name, m in self.named_modules() if isinstance(m, ModulatedLinear)]

    def sharpen(self, sharpness: mx.array | None) -> None:
        """Sets the sharpness of all trits; `None` makes them hard."""
        for _, linear in self.modulated():
            linear.sharpen(sharpness)

    def __call__(self, x: mx.array) -> mx.array:
        return run_blocks(self.blocks, self._arguments, x, self._run)


def window_loss(window: Window, batch: WindowBatch) -> mx.array:
    r"""How far a window is from the dense layers, summed over tokens, float32 `()`.

    .. math::
        \sum_{tokens} \mathrm{mean}_{dims}\; h\!\left(\frac{y - y^\ast}{\sigma}\right), \qquad
        h(e) = \begin{cases} e^2 / (2 \delta) & |e| < \delta \\ |e| - \delta / 2 &
        \text{otherwise} \end{cases}

    with the deviation :math:`\sigma` of the targets, so that the loss means the same in each layer.
    """
    window.sharpen(batch.sharpness)
    try:
        y = window(batch.inputs)
    finally:
        window.sharpen(None)
    error = mx.abs(y.astype(mx.float32) - batch.targets.astype(mx.float32)) / batch.deviation
    square = error.square() / (2 * DELTA)
    return long_sum(mx.where(error < DELTA, square, error - DELTA / 2)) / y.shape[-1]


def sharpness_at(share: float) -> float:
    """The sharpness of trits after a share of the steps, from 1 up to 30 where they become hard."""
    return 1 + (_SHARPEST - 1) * min(1.0, share / HARD_FROM) ** 3


def build_window_optimizer(name: str) -> optim.Optimizer:
    """AdamW without weight decay; each step has its own learning rate."""
    optimizer: optim.Optimizer = OPTIMIZERS[name](
        learning_rate=0.0, betas=[0.9, 0.999], weight_decay=0.0, bias_correction=True
    )
    return optimizer


Batches = Callable[[int], list[WindowBatch]]


def window_batches(
    inputs: OpenStream,
    targets: OpenStream,
    deviation: float,
    *,
    samples: int,
    batch_size: int,
    steps: int,
    seed: Sequence[int],
    soft: bool,
) -> Batches:
    """Maps a step to its batch. Each pass over the samples has an order of its own.

    Args:
        inputs: The stream before the ternary layers.
        targets: The stream after the dense ones.
        deviation: Of the targets.
        samples: How many are learned from, the first ones.
        batch_size: Samples of a batch.
        steps: The steps of the window.
        seed: Numbers that decide the order.
        soft: Whether trits become hard bit by bit.
    """
    per_epoch = samples // batch_size

    def of_step(step: int) -> list[WindowBatch]:
        epoch, number = divmod(step, per_epoch)
        order = np.random.default_rng([*seed, epoch]).permutation(samples)
        rows = order[number * batch_size : (number + 1) * batch_size].tolist()
        share = step / steps
        is_soft = soft and share < HARD_FROM
        sharpness = mx.array(sharpness_at(share)) if is_soft else None
        given = inputs.at(rows), targets.at(rows), mx.array(deviation)
        return [WindowBatch(*given, sharpness)]

    return of_step


def train_window(
    window: Window,
    batches: Batches,
    settings: LoopSettings,
    *,
    optimizer: str,
    learning_rate: float,
    words: str,
) -> None:
    """Trains a window in place. Its learning rate falls from its peak to 0.

    Args:
        window: The window.
        batches: The batch of each step.
        settings: The loop.
        optimizer: The name of the optimizer.
        learning_rate: Its learning rate at the start.
        words: The window in the progress bar.

    Raises:
        TrainingError: A loss is not finite.
        TrainingStopped: A signal ended it.
    """
    own = build_window_optimizer(optimizer)
    own.init(window.trainable_parameters())
    step_of: Any = OptimizerStep
    step = step_of(
        window,
        settings,
        own,
        lambda step: mx.array(learning_rate * (1 - step / settings.steps)),
        batches,
        window_loss,
        DataParallel(),
    )
    with Progress(words, settings.steps, "step") as bar, StopRequest(is_quiet=True) as request:
        for number in range(settings.steps):
            result = step(number)
            bar.set_postfix_str(f"loss {result.loss / result.terms:.4f}", refresh=False)
            bar.update()
            if request.signal:
                raise TrainingStopped(
                    f"[calibrate] a signal stopped the run in {words}; the windows before are kept in "
                    f"'{settings.folder}'. Repeat the command to go on from there.",
                    request.signal,
                )
