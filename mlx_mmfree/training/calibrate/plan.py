"""What a calibration takes: memory, disk, and the work of its windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from ...layers.matrix import matrices, parameters
from ..data_parallel import DataParallel
from ..distil.student import Effort
from ..memory import MemoryPlan, peak_bytes, plan_memory
from .layers import run_blocks
from .measures import MOST_LOGITS
from .window import WindowBatch, build_window_optimizer, window_loss

if TYPE_CHECKING:
    from .calibration import Calibration

LOW_RANK = 64
"""The rank of the change where whole weights do not fit into memory."""


@dataclass(frozen=True)
class CalibrationPlan:
    """What a run takes.

    Attributes:
        memory: Of the window that takes the most.
        rest_bytes: The most memory of what is not training: to read an embedding or a head, and to run
            dense layers.
        disk_bytes: The most capacity of the run's files at a time, with the model that is written.
        effort: The work of all windows.
        epoch: The work of one pass of all windows over the samples.
    """

    memory: MemoryPlan
    rest_bytes: int
    disk_bytes: int
    effort: Effort
    epoch: Effort

    @property
    def total(self) -> int:
        """The most memory at a time."""
        return max(self.memory.total, self.rest_bytes)


def plan_calibration(run: Calibration) -> CalibrationPlan:
    """Plans a run. Nothing is computed or written."""
    largest = max(range(len(run.windows)), key=lambda number: _weights(run, run.windows[number]))
    memory = plan_window(run, largest)
    epoch = _effort(run)
    tokens = epoch.tokens * run.settings.epochs
    return CalibrationPlan(
        memory,
        _rest_bytes(run, largest),
        _disk_bytes(run),
        Effort(tokens, epoch.operations),
        epoch,
    )


def plan_window(run: Calibration, number: int) -> MemoryPlan:
    """The memory of the training of a window."""
    settings, dtype = run.settings, run.loop().dtype
    shape = settings.batch_size, settings.sequence_length, run.layers.model.dims
    stream, one = mx.zeros(shape, run.stream_dtype), mx.array(1.0)
    batch = WindowBatch(stream, stream, one, one if settings.soft else None)
    with run.layers.unread(run.windows[number], mx.float32) as blocks:
        window = run.window(number, blocks, run.layers.model.block_arguments())
        return plan_memory(
            window,  # type: ignore[arg-type]
            build_window_optimizer(settings.optimizer),
            window_loss,
            batch,  # type: ignore[arg-type]
            replace(run.loop(), dtype=dtype),
            processes=DataParallel(),
        )


def _rest_bytes(run: Calibration, number: int) -> int:
    """The most memory of an embedding, a head, or dense layers of which targets are made."""
    settings, layers = run.settings, run.layers
    shape = settings.batch_size, settings.sequence_length, layers.model.dims
    x = mx.zeros(shape, run.compute_dtype)
    with layers.unread(run.windows[number], run.compute_dtype) as blocks:
        arguments = layers.model.block_arguments()
        own = [arguments[layer] for layer in run.windows[number]]
        weights = [array for block in blocks for array in parameters(block).values()]
        y = run_blocks(blocks, own, x)
        dense = sum(array.nbytes for array in weights)
        dense += x.nbytes + peak_bytes([y], leaves=[*weights, x])
    logits = 4 * min(MOST_LOGITS, settings.sequence_length * layers.model.num_logits)
    return max(
        dense,
        layers.nbytes(layers.embed_names) + x.nbytes,
        layers.nbytes(layers.head_names) + 2 * logits,
    )


def _weights(run: Calibration, layers: range) -> int:
    """The weights of the linears of some layers that become ternary."""
    found = 0
    for layer in layers:
        held = matrices(run.layers.model.blocks[layer])
        for name in run.layers.linears[layer]:
            found += held[name].input_dims * held[name].output_dims
    return found


def _disk_bytes(run: Calibration) -> int:
    """Three streams, what two windows share, trained layers in 2 bits, and the model."""
    settings, layers = run.settings, run.layers
    samples = settings.samples + settings.valid_samples
    stream = samples * settings.sequence_length * layers.model.dims * run.stream_dtype.size
    shared = max(
        (
            _weights(run, range(later.start, first.stop))
            for first, later in zip(run.windows, run.windows[1:], strict=False)
        ),
        default=0,
    )
    trained = _weights(run, range(run.windows[-1].stop))
    packed = trained // 4 + 4 * trained // settings.group_size
    names = {f"{path}.weight" for path in run.paths}
    rest = layers.nbytes(name for name in layers.names if name not in names)
    return 3 * stream + 2 * 4 * shared + 2 * packed + rest


def _effort(run: Calibration) -> Effort:
    """The work of one pass over the samples: three times that of all layers of all windows.

    What is elementwise is left out, and so are streams and measures, which each take less than a pass.
    """
    settings = run.settings
    weights = sum(_weights(run, window) for window in run.windows)
    tokens = (
        settings.samples // settings.batch_size * settings.batch_size * settings.sequence_length
    )
    return Effort(tokens, (8 if settings.grad_checkpoint else 6) * weights)
