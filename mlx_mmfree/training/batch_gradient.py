"""The loss of a batch and its gradient, as a graph that is built once for each form of a batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..layers.norms import running_statistics
from ..models import TokenModel
from ..ops.backend.choice import untimed
from ..ops.backend.compilation import compiled
from .batches import Batch
from .loss import Loss
from .precision import in_dtype


class BatchGradient:
    """Computes the sum of the losses of a batch and its gradient.

    The graph depends on the batch, the trainable parameters, running statistics and the random key.
    Frozen parameters are constants of it. Kernels are not chosen by timing, since a resumed run must
    choose the same ones.

    Args:
        model: The model.
        loss: The sum of the losses of a batch.
        repeats_graphs: Whether the graph of a batch is compiled and repeated for others of its form.
        dtype: The float dtype to compute in, which gradients have too; `None` is that of the weights.
    """

    def __init__(
        self, model: TokenModel, loss: Loss, repeats_graphs: bool, dtype: mx.Dtype | None = None
    ):
        self._model = model
        computed: Callable[..., tuple[mx.array, Any]] = nn.value_and_grad(model, loss)
        # not around the loss alone: gradients in 16 bits take half of the memory, and lose nothing
        self._loss_and_gradient = computed if dtype is None else in_dtype(computed, model, dtype)
        self._repeats_graphs = repeats_graphs
        self._graphs: dict[Any, Callable[..., tuple[mx.array, Any, dict[str, mx.array]]]] = {}

    def __call__(self, batch: Batch, *, is_special: bool = False) -> tuple[mx.array, Any]:
        """The loss and its gradient, yet to be computed.

        Args:
            batch: The batch.
            is_special: Whether the model differs from how other steps find it, so that the graph holds
                for this call alone.
        """
        with untimed():
            if is_special or not self._repeats_graphs:
                return self._loss_and_gradient(self._model, batch)
            given = {name: array for name, array in vars(batch).items() if array is not None}
            form = type(batch), *((name, array.shape) for name, array in given.items())
            if form not in self._graphs:
                function = partial(_traced, self._model, self._loss_and_gradient, batch)
                self._graphs[form] = compiled(function, is_random=True)
            arrays = {name: mx.array(array) for name, array in given.items()}
            model = self._model
            loss, gradient, statistics = self._graphs[form](
                arrays, model.trainable_parameters(), running_statistics(model)
            )
            _set(model, statistics)
            return loss, gradient


def _traced(
    model: TokenModel,
    loss_and_gradient: Callable[..., tuple[mx.array, Any]],
    batch: Batch,
    arrays: dict[str, Any],
    parameters: dict[str, Any],
    statistics: dict[str, mx.array],
) -> tuple[mx.array, Any, dict[str, mx.array]]:
    own = model.trainable_parameters()
    known = running_statistics(model)
    model.update(parameters)
    _set(model, statistics)
    try:
        loss, gradient = loss_and_gradient(model, replace(batch, **arrays))
        return loss, gradient, running_statistics(model)
    finally:
        model.update(own)
        _set(model, known)


def _set(model: nn.Module, arrays: dict[str, mx.array]) -> None:
    model.update(tree_unflatten(list(arrays.items())))
