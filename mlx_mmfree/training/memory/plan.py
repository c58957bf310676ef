"""The plan of the memory that a training run will take, made before it begins."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import BackendError
from ...models import TokenModel
from ...platform.device import DeviceInfo, device_info
from ..batches import Batch
from ..data_parallel import DataParallel
from ..loss import Loss, kept_logits
from ..optimizer_step import OptimizerStep, StepGraphs, update_groups
from ..run_settings import LoopSettings
from .peak import peak_bytes


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
        """A line that says what does not fit, and the way out; `None` if all fits."""
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
            gradients + peak_bytes([graphs.norm], leaves=_arrays(graphs.gradient)),
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
        logits=kept_logits(model, batch) * mx.float32.size,
        batch=sum(array.nbytes for array in batch_arrays),
    )


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
    """What the forward and backward pass take beside the weights, with the gradient."""
    added = _arrays(graphs.gradient)
    if parts == 1:
        return peak_bytes([graphs.loss, *added], leaves=weights)
    before = [mx.zeros_like(array) for array in added]
    sums = [old + new for old, new in zip(before, added, strict=True)]
    return peak_bytes([graphs.loss, *sums], leaves=weights, freed=before, held=added)


def _update_bytes(graphs: StepGraphs, trained: list[mx.array], state: list[mx.array]) -> int:
    """What the update takes, with old weights, their gradient and their state."""
    groups = update_groups(graphs.parameters, graphs.state)
    old = [*trained, *_arrays(graphs.gradient), *state]
    return peak_bytes(*groups, leaves=[], freed=old)


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
