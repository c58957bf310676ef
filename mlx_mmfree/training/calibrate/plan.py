"""Memory, disk space and work that a calibration takes."""

from dataclasses import dataclass, replace

import mlx.core as mx

from ...layers.matrix import parameters
from ..data_parallel import DataParallel
from ..distil.student import Effort
from ..memory import MemoryPlan, peak_bytes, plan_memory
from .course import Course
from .layers import run_blocks
from .measures import MOST_LOGITS
from .window import WindowBatch, build_window_optimizer, window_loss

LOW_RANK = 64
"""The rank of the change where whole weights do not fit into memory."""


@dataclass(frozen=True)
class CalibrationPlan:
    """The memory, disk space and work of a run.

    Attributes:
        memory: Of the window that takes the most.
        rest_bytes: The most memory of what is not training: to read an embedding or a head, and to run
            dense layers.
        disk_bytes: The most bytes that the run's files take at a time, with the model that is written.
        effort: The work of all windows.
        epoch: The work of one pass of all windows over the samples.
    """

    memory: MemoryPlan
    rest_bytes: int
    disk_bytes: int
    effort: Effort
    epoch: Effort


def plan_calibration(course: Course) -> CalibrationPlan:
    """Plans a course. Nothing is computed or written."""
    memory = plan_window(course, course.largest)
    epoch = _effort(course)
    tokens = epoch.tokens * course.settings.epochs
    return CalibrationPlan(
        memory,
        _rest_bytes(course, course.largest),
        _disk_bytes(course),
        Effort(tokens, epoch.operations),
        epoch,
    )


def plan_window(course: Course, number: int) -> MemoryPlan:
    """The memory of the training of a window."""
    settings, dtype = course.settings, course.loop().dtype
    shape = settings.batch_size, settings.sequence_length, course.layers.model.dims
    stream, one = mx.zeros(shape, course.stream_dtype), mx.array(1.0)
    batch = WindowBatch(stream, stream, one, one if settings.soft else None)
    with course.layers.unread(course.windows[number], mx.float32) as blocks:
        window = course.window(number, blocks, course.layers.model.block_arguments())
        return plan_memory(
            window,  # type: ignore[arg-type]
            build_window_optimizer(settings.optimizer),
            window_loss,
            batch,  # type: ignore[arg-type]
            replace(course.loop(), dtype=dtype),
            processes=DataParallel(),
        )


def _rest_bytes(course: Course, number: int) -> int:
    """The most memory of an embedding, a head, or dense layers of which targets are made."""
    settings, layers = course.settings, course.layers
    shape = settings.batch_size, settings.sequence_length, layers.model.dims
    x = mx.zeros(shape, course.compute_dtype)
    with layers.unread(course.windows[number], course.compute_dtype) as blocks:
        arguments = layers.model.block_arguments()
        own = [arguments[layer] for layer in course.windows[number]]
        weights = [array for block in blocks for array in parameters(block).values()]
        y = run_blocks(blocks, own, x)
        dense = sum(array.nbytes for array in weights)
        dense += x.nbytes + peak_bytes([y], inputs=[*weights, x])
    logits = 4 * min(MOST_LOGITS, settings.sequence_length * layers.model.num_logits)
    return max(
        dense,
        layers.nbytes(layers.embed_names) + x.nbytes,
        layers.nbytes(layers.head_names) + 2 * logits,
    )


def _disk_bytes(course: Course) -> int:
    """Three streams, what two windows share, trained layers in 2 bits, and the model."""
    settings, layers = course.settings, course.layers
    samples = settings.samples + settings.valid_samples
    stream = samples * settings.sequence_length * layers.model.dims * course.stream_dtype.size
    shared = max(
        (
            course.weights(range(later.start, first.stop))
            for first, later in zip(course.windows, course.windows[1:], strict=False)
        ),
        default=0,
    )
    trained = course.weights(range(course.windows[-1].stop))
    packed = trained // 4 + 4 * trained // settings.group_size
    names = {f"{path}.weight" for path in course.paths}
    rest = layers.nbytes(name for name in layers.names if name not in names)
    return 3 * stream + 2 * 4 * shared + 2 * packed + rest


def _effort(course: Course) -> Effort:
    """The work of one pass over the samples: three times the work of all layers of all windows.

    What is elementwise is left out, and so are streams and measures, which each take less than a pass.
    """
    settings = course.settings
    weights = sum(course.weights(window) for window in course.windows)
    tokens = (
        settings.samples // settings.batch_size * settings.batch_size * settings.sequence_length
    )
    return Effort(tokens, (8 if settings.grad_checkpoint else 6) * weights)
