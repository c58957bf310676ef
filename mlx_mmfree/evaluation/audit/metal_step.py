"""Costs of a decoded token on Metal beside its arithmetic: launches, and copies of what is still held.

MLX gathers launches in command buffers, and holds what they read until the GPU has finished with them. A
buffer ends after so many launches, or inputs of so many elements, and about eleven may be unfinished.
The next step is started while one is computed. So an array that the last step has read is copied before
it is written into, unless a step takes more buffers than may be unfinished.

Source: MLX 0.32, `mlx/backend/metal/device.cpp` (limits of a buffer) and `mlx/transforms.cpp`
(`MAX_ACTIVE_TASKS`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from mlx.utils import tree_flatten, tree_unflatten

from ...layers.attention.key_values import GROWTH_STEP, TailedKeyValueState
from ...layers.merged import merge_projections
from ...layers.states import HELD_TAILS, TAIL_SLOTS
from ...models import Decoder
from ...ops.backend import choice, dispatch, launch
from ...ops.backend.graph import dispatches
from .primitives import ELEMENTWISE, VIEWS
from .record import Recording, record

UNFINISHED = 11
"""The most command buffers that are unfinished while a step is started."""

BUFFER_LIMIT = 40
"""The launches of a command buffer, and the 2^20 elements of its inputs, after which it ends."""

LARGE_BUFFER_LIMIT = 50
"""The same on Max and Ultra chips."""

_WRITES = {"DynamicSliceUpdate", "SliceUpdate", "Scatter", "ScatterAxis"}
# `Depends` stands for a kernel
_SILENT = VIEWS - {"Depends"} | {"Full"}


class MetalOperation(NamedTuple):
    """An operation of MLX that launches kernels.

    Attributes:
        launches: How many.
        elements: Numbers that its inputs have.
        of_state: Those of them that are of the state.
        writes_into: Bytes of the state that it writes into, all of which are copied if they are held.
    """

    launches: int
    elements: int
    of_state: int = 0
    writes_into: int = 0


@dataclass(frozen=True)
class MetalStep:
    """A decoded token on Metal, after many others.

    Attributes:
        operations: In the order in which they are started.
        tails: Bytes of keys and values that are moved so that nothing is copied: the tails, which each
            step reads and writes anew, and its share of what writes them into the caches.
        growth: Bytes that are moved because caches grow, a step's share.
        caches: Bytes of the keys and values of each attention layer, with all their slots.
        held_tails: Bytes of the tails that are in memory at once.
    """

    operations: Sequence[MetalOperation]
    tails: int
    growth: int
    caches: Sequence[int]
    held_tails: int = 0

    def command_buffers(self, limit: int = BUFFER_LIMIT) -> int:
        """How many there are, the last one full or not."""
        found, launches, elements = 0, 0, 0
        for each in self.operations:
            launches += each.launches
            elements += each.elements
            if launches > limit or elements >> 20 > limit:
                found, launches, elements = found + 1, 0, 0
        return found + (launches > 0)

    def copies(self, limit: int = BUFFER_LIMIT) -> list[int]:
        """The bytes of each array that is copied before it is written into."""
        if self.command_buffers(limit) > UNFINISHED:
            return []
        return [each.writes_into for each in self.operations if each.writes_into]

    def launches(self, limit: int = BUFFER_LIMIT) -> int:
        """The launches of a step, copies among them."""
        return sum(each.launches for each in self.operations) + len(self.copies(limit))

    def moved(self, limit: int = BUFFER_LIMIT) -> int:
        """Bytes that are read or written beside what attention reads and a row for each cache."""
        return self.tails + self.growth + 2 * sum(self.copies(limit))


def metal_step(model: Decoder, position: int) -> MetalStep:
    """How a model decodes the token after so many others, one text alone.

    It is counted in a graph that is built without Metal, of the projections that are merged there. The
    kernels are those that are chosen where none was timed. Numbers and views launch none, and nor does
    what MLX fuses with the operation that follows.
    """
    with (
        launch.recording(is_linked=True),
        dispatch.use_any_backend(),
        choice.use(choice.DEFAULT),
        merged_projections(model),
    ):
        dispatch.forget_candidates()
        try:
            recording = record(model, position, has_tails=True)
        finally:
            dispatch.forget_candidates()
    numbers = [n for n in range(len(recording.graph.nodes)) if _launches(recording, n)]
    operations = [_operation(recording, number) for number in numbers]
    return MetalStep(operations, *_of_caches(recording.state_tree))


@contextmanager
def merged_projections(model: Decoder) -> Iterator[None]:
    """Joins projections inside the `with` block."""
    own = tree_flatten(model.parameters())
    merge_projections(model, is_lazy=True)
    try:
        yield
    finally:
        # no view of merged arrays is left, so that they are not used any more
        model.update(cast(Any, tree_unflatten(cast(Any, own))))


def _launches(recording: Recording, number: int) -> bool:
    """Returns whether an operation launches a kernel of its own for each token."""
    node = recording.graph.nodes[number]
    if node.name in _SILENT or not any(recording.depends[index] for index in node.outputs):
        return False
    readers = [recording.graph.nodes[n] for n in recording.readers(node.outputs[0])]
    return not (node.name in ELEMENTWISE and len(readers) == 1 and readers[0].name in ELEMENTWISE)


def _operation(recording: Recording, number: int) -> MetalOperation:
    node, arrays = recording.graph.nodes[number], recording.graph.arrays
    elements = of_state = writes_into = 0
    for index in node.inputs:
        origin = recording.origin(index)
        size = min(arrays[index].size, arrays[origin].size)
        elements += size
        of_state += size if origin in recording.state else 0
    if node.name in _WRITES and recording.origin(node.inputs[0]) in recording.state:
        writes_into = arrays[node.inputs[0]].nbytes
    count = dispatches(node.name, len(node.inputs))
    return MetalOperation(count, elements, of_state, writes_into)


def _of_caches(state: Any) -> tuple[int, int, list[int], int]:
    """A step's share of the bytes that tails and growing take, and the bytes of caches and of tails."""
    tails, held, caches = 0, 0, []
    for each in state:
        if isinstance(each, TailedKeyValueState):
            tail = each.tail.keys.nbytes + each.tail.values.nbytes
            # a full tail is read and written once for as many tokens as it has slots
            tails += 2 * tail + 2 * tail // TAIL_SLOTS
            held += HELD_TAILS * tail
            caches.append(each.keys.nbytes + each.values.nbytes)
    return tails, 2 * sum(caches) // GROWTH_STEP, caches, held
