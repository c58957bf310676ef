"""The memory that a run will take, found without computing anything.

MLX's CPU backend allocates the results of an operation when it hands the operation to the thread that
computes, and frees what an operation has read when that thread has run it. The thread lags behind by up
to about a hundred tasks, so that memory depends on the order of the operations and on this lag. Both are
followed here (`eval_impl` in MLX's transforms.cpp).
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import BackendError, UsageError
from ..models import TokenModel
from ..ops.backend.graph import Graph, GraphNode, graph_of
from ..platform.device import DeviceInfo, device_info
from ..platform.resident_memory import BYTES_PER_GB
from .batches import Batch
from .data_parallel import DataParallel
from .losses.loss import Loss, logits_at_a_time
from .optimizer_step import OptimizerStep, StepGraphs, update_groups
from .run_settings import LoopSettings

_WIDTH = 20
"""How many operations MLX puts side by side before it goes deeper (`MLX_BFS_MAX_WIDTH`)."""

_LAG = 110
"""The tasks that have been submitted and not run, where operations are slow: 11 groups of 10."""

_VIEWS = {
    *("AsStrided", "Broadcast", "Copy", "ExpandDims", "Flatten", "Reshape", "Slice", "Split"),
    *("Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
}
"""Operations whose results look at the memory of their first input."""

_RESHAPES = {"Flatten", "Reshape", "Unflatten"}
"""Those that copy an input that is not in order."""

_PASSING = {"CustomTransforms", "Depends"}
"""Operations whose results are their last inputs, or in turn their first ones."""

_ELEMENTWISE = {
    *("Abs", "Add", "AsType", "BitwiseBinary", "Ceil", "Cos", "Divide", "Equal", "Erf", "Exp"),
    *("Expm1", "Floor", "Greater", "GreaterEqual", "Less", "LessEqual", "Log", "Log1p"),
    *("LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Multiply"),
    *("Negative", "NotEqual", "Power", "Remainder", "Round", "Rsqrt", "Select", "Sigmoid", "Sign"),
    *("Sin", "Softmax", "Sqrt", "Square", "Subtract", "Tanh"),
}
"""Operations that write their result over an input that nothing else needs."""


def peak_bytes(
    *results: Sequence[mx.array],
    inputs: Sequence[mx.array],
    freed: Sequence[mx.array] = (),
    retained: Sequence[mx.array] = (),
) -> int:
    """The most bytes that MLX takes at a time on a CPU, beside the leaves, to compute arrays.

    Args:
        results: The arrays, in the groups that are computed one after the other.
        inputs: Arrays that are known by then and stay in memory, which is not counted.
        freed: Further ones, which are counted, and freed once they have been read.
        retained: Arrays of the graph that somebody else holds too.

    Raises:
        BackendError: The compiled extension, which reads the graph, cannot be used.
    """
    graph = graph_of([*chain(*results), *retained], [*inputs, *freed])
    memory = _Memory(graph, len(inputs), len(inputs) + len(freed))
    results_left = iter(graph.results)
    for order in _orders(graph, [list(islice(results_left, len(group))) for group in results]):
        for node in order:
            memory.run(graph.nodes[node])
        memory.wait()
    return memory.peak


def _orders(graph: Graph, groups: Iterable[Sequence[int]]) -> Iterator[list[int]]:
    """The operations for each group of results, in the order in which MLX runs them."""
    maker = {array: n for n, node in enumerate(graph.nodes) for array in node.outputs}
    inputs = [[maker[a] for a in node.inputs if a in maker] for node in graph.nodes]
    done: set[int] = set()
    for group in groups:
        order = _order(inputs, [maker[array] for array in group if array in maker], done)
        done.update(order)
        yield order


def _order(
    inputs: Sequence[Sequence[int]], roots: Sequence[int], done: Container[int]
) -> list[int]:
    """The order in which MLX runs operations: a breadth-first search backwards.

    Args:
        inputs: The operations that make the inputs of each operation.
        roots: Those that make the results.
        done: Those that have run before.
    """
    root = len(inputs)
    makers: dict[int, list[int]] = {root: [node for node in roots if node not in done]}
    uses: Counter[int] = Counter()
    found = [root]
    while found:
        for node in makers[found.pop()]:
            uses[node] += 1
            if node not in makers:
                makers[node] = [each for each in inputs[node] if each not in done]
                found.append(node)
    tape, at = [root], 0
    waiting: list[tuple[int, int]] = []
    while at < len(tape) or waiting:
        if at < len(tape):
            node, first = tape[at], 0
            at += 1
        else:
            node, first = waiting.pop()
        for n in range(first, len(makers[node])):
            if len(tape) - at >= _WIDTH:
                waiting.append((node, n))
                break
            maker_of_input = makers[node][n]
            uses[maker_of_input] -= 1
            if uses[maker_of_input] == 0:
                tape.append(maker_of_input)
    return tape[:0:-1]


class _Memory:
    """The memory that arrays of a graph take, as MLX counts the references to it.

    Args:
        graph: The graph.
        kept: The number of leaves that stay.
        known: The number of all leaves.

    Attributes:
        peak: The most bytes so far.
    """

    def __init__(self, graph: Graph, first: int, known: int):
        self._arrays = graph.arrays
        self._readers = Counter(graph.results)
        for node in graph.nodes:
            self._readers.update(node.inputs)
        self._block: dict[int, int] = {}
        self._size: dict[int, int] = {}
        self._holders: Counter[int] = Counter()
        self._in_order = [True] * len(graph.arrays)
        self._running: deque[tuple[int, list[int]]] = deque()
        self._tasks = 0
        self._total = 0
        self.peak = 0
        for array in range(first, known):
            self._allocate(array)

    def run(self, node: GraphNode) -> None:
        """Hands over an operation."""
        self._finish(self._tasks - _LAG)
        if not self._pass_on(node):
            self._compute(node)
        self.peak = max(self.peak, self._total)
        blocks = {self._block.get(array) for array in (*node.inputs, *node.outputs)}
        blocks -= {None, self._block.get(node.outputs[0])}
        in_use = [block for block in blocks if block is not None]
        self._holders.update(in_use)
        self._running.append((self._tasks, in_use))
        self._readers.subtract(node.inputs)
        for array in {*node.inputs, *node.outputs}:
            if self._readers[array] <= 0 and array in self._block:
                self._drop(self._block.pop(array))

    def wait(self) -> None:
        """Waits for all operations that have been submitted."""
        self._finish(self._tasks)

    def _finish(self, task: int) -> None:
        """Lets the operations end up to a task."""
        while self._running and self._running[0][0] <= task:
            for block in self._running.popleft()[1]:
                self._drop(block)

    def _pass_on(self, node: GraphNode) -> bool:
        """Returns whether the results are views of inputs, which they then become."""
        if node.name in _PASSING:
            count = len(node.outputs)
            sources = node.inputs[-count:] if node.name == "CustomTransforms" else node.inputs
        elif node.name in _VIEWS:
            if node.name in _RESHAPES and not self._in_order[node.inputs[0]]:
                return False
            sources = node.inputs[:1] * len(node.outputs)
        else:
            return False
        for array, source in zip(node.outputs, sources, strict=False):
            if source in self._block:
                self._block[array] = self._block[source]
                self._holders[self._block[array]] += 1
            self._in_order[array] = self._in_order[source] and self._keeps_order(
                node.name, source, array
            )
        self._tasks += 1
        return True

    def _keeps_order(self, name: str, source: int, array: int) -> bool:
        """Returns whether the numbers of a view lie one after the other if its source's do."""
        before, after = self._arrays[source], self._arrays[array]
        if name == "Transpose":
            return sum(size > 1 for size in after.shape) < 2
        if name in ("Slice", "Split"):
            return after.shape[1:] == before.shape[1:]
        return name not in ("AsStrided", "Broadcast") or after.nbytes == before.nbytes

    def _compute(self, node: GraphNode) -> None:
        reused = self._reusable(node)
        for array in node.outputs:
            if reused is None:
                self._allocate(array)
            else:
                self._block[array] = reused
                self._holders[reused] += 1
                reused = None
        self._tasks += len(node.inputs) + 1 if node.name == "Concatenate" else 2

    def _reusable(self, node: GraphNode) -> int | None:
        """The memory of an input that nothing else needs and in which the result is written."""
        if node.name not in _ELEMENTWISE and not node.name.startswith("Compiled"):
            return None
        size = self._arrays[node.outputs[0]].nbytes
        for array in node.inputs:
            block = self._block.get(array)
            if block is None or self._size[block] != size or self._arrays[array].nbytes != size:
                continue
            if self._readers[array] == self._holders[block] == 1:
                return block
        return None

    def _allocate(self, array: int) -> None:
        block = len(self._holders)
        self._block[array] = block
        self._holders[block] = 1
        self._size[block] = self._arrays[array].nbytes
        self._total += self._size[block]

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if not self._holders[block]:
            self._total -= self._size[block]


@dataclass(frozen=True)
class MemoryPlan:
    """The most memory of MLX's arrays at a time, in bytes.

    On a CPU, it follows from the operations of a step and their order. On other devices it is an
    estimate, since they keep memory for as long as their queues of operations need it.

    Attributes:
        device: Where it is taken.
        masters: The weights that are trained.
        weights: All other weights, packed ones too.
        moments: The state of the optimizer.
        gradients: The gradient of the trained weights.
        activations: The largest rest: what the backward pass needs of the forward pass, logits, and
            arrays that are needed for a moment. `None` if the compiled extension is missing, which
            reads the operations.
        logits: The part of it that logits take.
        batch: The tokens, targets and weights of a batch.
    """

    device: DeviceInfo
    masters: int
    weights: int
    moments: int
    gradients: int
    activations: int | None
    logits: int
    batch: int

    @property
    def total(self) -> int:
        parts = (self.masters, self.weights, self.moments, self.gradients, self.batch)
        return sum(parts) + (self.activations or 0)

    def __str__(self) -> str:
        word = "Planned" if self.device.backend == "cpu" else "Estimated"
        parts = {
            "trained weights": self.masters,
            "other weights": self.weights,
            "moments": self.moments,
            "gradients": self.gradients,
            "batch": self.batch,
        }
        shown = [f"{name} {_size(size)}" for name, size in parts.items() if size]
        if self.activations is None:
            shown.append("activations unknown, as the compiled extension is missing")
        else:
            logits = f"with {_size(self.logits)} of logits"
            shown.append(f"activations {_size(self.activations)} {logits}")
        total = _size(self.total)
        return f"{word} memory on {self.device.backend}: {total} ({', '.join(shown)})."

    def warning(self) -> str | None:
        """A line that says what does not fit, with a hint; `None` if all fits."""
        device = self.device
        offers = [device.memory_bytes]
        if device.working_set_bytes is not None:
            offers.append(device.working_set_bytes)
        if device.available_bytes is not None:
            # weights that have been loaded are in the plan too
            offers.append(device.available_bytes + mx.get_active_memory())
        offered = min(offers)
        if self.total <= offered:
            return None
        return (
            f"[memory] the run needs {_size(self.total)} but {device.name} has {_size(offered)} for it: "
            "it may be slow or fail. Turn on grad_checkpoint, use adamw8bit or adapters, or lower the "
            "batch size (with more accumulation steps) or the length."
        )

    def check(self, allowed_bytes: int | None, description: Mapping[str, Any]) -> None:
        """Refuses a run that needs more than all memory of the device.

        Args:
            allowed_bytes: What the user lets it take all the same, where the system swaps.
            description: What the user says of the model; empty for one that is read.

        Raises:
            UsageError: It needs more. The message names what asks for most of it.
        """
        most = max(self.device.memory_bytes, allowed_bytes or 0)
        if self.total <= most:
            return
        model = self.masters + self.weights + self.moments + self.gradients
        numbers = dict(_whole_numbers(description))
        if model <= most:
            cause = "the batch"
            way = "lower 'batch_size' (with more accumulation steps), turn on grad_checkpoint"
        elif numbers:
            name = max(numbers, key=numbers.__getitem__)
            cause = f"the 'model', whose largest number is {name!r:.80}, {numbers[name]:,}"
            way = "lower it"
        else:
            cause, way = "the model", "take a smaller one, or train adapters"
        raise UsageError(
            f"[memory] the run must fit into the {_size(most)} of {self.device.name} but needs "
            f"{_size(self.total)} for {cause}: {way}, or let it swap with --memory-limit "
            f"{math.ceil(self.total / BYTES_PER_GB)}."
        )


def _whole_numbers(description: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers of a description by their names, also of nested ones."""
    for name, value in description.items():
        if isinstance(value, Mapping):
            yield from _whole_numbers(value)
        elif type(value) is int:
            yield name, value


def plan_memory(
    model: TokenModel,
    optimizer: optim.Optimizer,
    loss: Loss,
    batch: Batch,
    settings: LoopSettings,
    *,
    processes: DataParallel,
    parts: int = 1,
    companions: Sequence[TokenModel] = (),
) -> MemoryPlan:
    """Plans the memory of a training step. Nothing is computed.

    Args:
        model: The model, whose weights may be uncomputed still.
        optimizer: An optimizer for this plan alone.
        loss: As of the run.
        batch: A batch as large as the largest of the run.
        settings: As of the run.
        processes: The processes that train together.
        parts: The number of batches in a step.
        companions: Other models that the run uses and that do not learn.
    """
    optimizer.init(model.trainable_parameters())
    step = OptimizerStep(
        model, settings, optimizer, lambda _: mx.array(1.0), lambda _: [batch], loss, processes
    )
    trained, state = _arrays(model.trainable_parameters()), _arrays(optimizer.state)
    with _frozen(model, companions) as frozen:
        graphs = step.graphs(batch, parts)
    masters, moments, weights = map(_nbytes, (trained, state, frozen))
    gradients = _nbytes(_arrays(graphs.gradient))
    try:
        most = max(
            _backward_bytes(graphs, [*trained, *frozen], parts),
            gradients + peak_bytes([graphs.norm], inputs=_arrays(graphs.gradient)),
            _update_bytes(graphs, trained, state) - masters - moments,
        )
        activations: int | None = max(0, most - gradients)
    except BackendError:
        activations = None
    batch_arrays = (array for array in vars(batch).values() if array is not None)
    return MemoryPlan(
        device=device_info(),
        masters=masters,
        weights=weights,
        moments=moments,
        gradients=gradients,
        activations=activations,
        logits=logits_at_a_time(model, batch.targets.size) * mx.float32.size,
        batch=sum(array.nbytes for array in batch_arrays),
    )


_PLANNED_LOGITS = 2**30
"""The most logits of a batch whose step is planned as a whole."""


def plan_rows(
    plan: Callable[[Batch], MemoryPlan], batch_of: Callable[[int], Batch], rows: int, logits: int
) -> MemoryPlan:
    """Plans a step of rows of one length. The plan of very many is computed from the plans of fewer.

    A step computes its logits in blocks, and its graph grows with their number. From a few blocks on,
    each row adds the same memory.

    Args:
        plan: Plans a step with a batch.
        batch_of: Makes a batch of a number of rows.
        rows: The number of rows of the step.
        logits: The number of logits of a row.
    """
    most = max(4, _PLANNED_LOGITS // logits)
    if rows <= most:
        return plan(batch_of(rows))
    few, many = (plan(batch_of(count)) for count in (most // 2, most))
    steps = (rows - most) / (most - most // 2)

    def grown(before: int, after: int) -> int:
        return after + round(steps * (after - before))

    activations = None
    if few.activations is not None and many.activations is not None:
        activations = grown(few.activations, many.activations)
    return replace(many, activations=activations, batch=grown(few.batch, many.batch))


@contextmanager
def _frozen(model: TokenModel, companions: Sequence[TokenModel]) -> Iterator[list[mx.array]]:
    """Gives models other frozen weights inside the `with` block, which are known and take no memory.

    Graphs that are repeated would otherwise compute weights that are yet to be computed.
    """
    trained = dict(_named(model.trainable_parameters()))
    own = [(each, dict(_named(each.parameters()))) for each in companions]
    own.append((model, {n: a for n, a in _named(model.parameters()) if n not in trained}))
    arrays = {id(array): array for _, weights in own for array in weights.values()}
    known = {key: mx.broadcast_to(mx.zeros((), a.dtype), a.shape) for key, a in arrays.items()}
    mx.eval(list(known.values()))
    try:
        for each, weights in own:
            each.update(tree_unflatten([(n, known[id(a)]) for n, a in weights.items()]))
        yield list(known.values())
    finally:
        for each, weights in own:
            each.update(tree_unflatten(list(weights.items())))


def _backward_bytes(graphs: StepGraphs, weights: list[mx.array], parts: int) -> int:
    """The memory of the forward and backward pass beside the weights, with the gradient."""
    added = _arrays(graphs.gradient)
    if parts == 1:
        return peak_bytes([graphs.loss, *added], inputs=weights)
    before = [mx.zeros_like(array) for array in added]
    sums = [old + new for old, new in zip(before, added, strict=True)]
    return peak_bytes([graphs.loss, *sums], inputs=weights, freed=before, retained=added)


def _update_bytes(graphs: StepGraphs, trained: list[mx.array], state: list[mx.array]) -> int:
    """The memory of the update, with old weights, their gradient and their state."""
    groups = update_groups(graphs.parameters, graphs.state)
    old = [*trained, *_arrays(graphs.gradient), *state]
    return peak_bytes(*groups, inputs=[], freed=old)


def _named(tree: Any) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def _arrays(tree: Any) -> list[mx.array]:
    return [array for _, array in _named(tree)]


def _nbytes(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def _size(size_bytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes / 1e3:.3g} kB"
