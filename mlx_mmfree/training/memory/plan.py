"""The plan of the memory that a training run will take, made before it begins."""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from ...errors import BackendError
from ...models import TokenModel
from ...platform.device import DeviceInfo, device_info
from ..batches import Batch
from ..data_parallel import DataParallel
from ..loop_settings import LoopSettings
from ..loss import Loss, kept_logits
from ..optimizer_step import OptimizerStep, StepGraphs
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
    others: int = 0,
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
        others: Bytes of other models that the run uses.
    """
    optimizer.init(model.trainable_parameters())
    step = OptimizerStep(
        model, settings, optimizer, lambda _: mx.array(1.0), lambda _: [batch], loss, processes
    )
    trained, state = _arrays(model.trainable_parameters()), _arrays(optimizer.state)
    everything = _arrays(model.parameters())
    masters, moments = _nbytes(trained), _nbytes(state)
    graphs = step.graphs(batch)
    gradients = _nbytes(_arrays(graphs.gradient))
    known = {id(array) for array in trained}
    frozen = [array for array in everything if id(array) not in known]
    try:
        most = max(
            _backward_bytes(graphs, everything, parts),
            gradients + peak_bytes([graphs.norm], [*everything, *_arrays(graphs.gradient)]),
            gradients + _update_bytes(graphs, frozen, [*trained, *state]) - masters - moments,
        )
        activations: int | None = max(0, most - gradients)
    except BackendError:
        activations = None
    batch_arrays = (array for array in vars(batch).values() if array is not None)
    return MemoryPlan(
        device=device_info(),
        masters=masters,
        weights=_nbytes(frozen) + others,
        moments=moments,
        gradients=gradients,
        activations=activations,
        logits=kept_logits(model, batch) * mx.float32.size,
        batch=sum(array.nbytes for array in batch_arrays),
    )


def _backward_bytes(graphs: StepGraphs, weights: list[mx.array], parts: int) -> int:
    """What the forward and backward pass take beside the weights, with the gradient."""
    added = _arrays(graphs.gradient)
    if parts == 1:
        return peak_bytes([graphs.loss, *added], weights)
    before = [mx.zeros_like(array) for array in added]
    sums = [old + new for old, new in zip(before, added, strict=True)]
    return peak_bytes([graphs.loss, *sums], weights, freed=before, held=added)


def _update_bytes(graphs: StepGraphs, frozen: list[mx.array], old: list[mx.array]) -> int:
    """What the update takes beside frozen weights and the gradient."""
    new = [*_arrays(graphs.parameters), *_arrays(graphs.state)]
    return peak_bytes(new, [*frozen, *_arrays(graphs.gradient)], freed=old)


def _named(tree: Any) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def _arrays(tree: Any) -> list[mx.array]:
    return [array for _, array in _named(tree)]


def _nbytes(arrays: list[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def _size(size_bytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes / 1e3:.3g} kB"
