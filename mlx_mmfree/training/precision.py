"""The float dtype in which a training step computes, while master weights and moments stay float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..layers.matrix import fixed_dtype_names, matrices, parameters
from ..layers.norms import running_statistics
from ..ops.device import on_cpu

COMPUTE_DTYPES = ("float32", "bfloat16")
"""The dtypes that a step may compute in. In float16, small gradients would vanish."""

ADAPTER_DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes that the base model under an adapter may have."""

Result = TypeVar("Result")
Function = Callable[..., Result]


def compute_dtype(asked: str) -> mx.Dtype:
    """The dtype to compute in: what was asked for, but float32 where the device is slow at 16 bits.

    Args:
        asked: One of `COMPUTE_DTYPES`.
    """
    return mx.float32 if asked == "float32" or on_cpu() else mx.bfloat16


def precision_note(asked: str) -> str | None:
    """A line that says what a run does that was asked for 16 bits; `None` for float32."""
    if asked == "float32":
        return None
    rest = "Master weights, moments and what is saved are float32."
    if compute_dtype(asked) == mx.float32:
        return f"The run computes in float32, because CPUs are slow at {asked}. {rest}"
    return f"The run computes in {asked}. {rest}"


def in_dtype(function: Function[Result], model: nn.Module, dtype: mx.Dtype) -> Function[Result]:
    """A function of a model, computed with the model's floats in another dtype.

    Each call makes copies of the floats, through which gradients flow to the model's own in their own
    dtype. Packed matrices stay as they are, and so do running statistics, and master weights that are
    rounded to ternary: a rounded one could give another trit.

    Args:
        function: Is called with the model and perhaps more.
        model: The model.
        dtype: The dtype.
    """
    names = _cast_names(model, dtype)
    if not names:
        return function

    def computed(model: nn.Module, *arguments: Any) -> Result:
        given = parameters(model)
        _update(model, {name: given[name].astype(dtype) for name in names})
        try:
            return function(model, *arguments)
        finally:
            _update(model, {name: given[name] for name in names})

    return computed


@contextmanager
def frozen_in_dtype(model: nn.Module, dtype: mx.Dtype) -> Iterator[None]:
    """Keeps what is frozen of a model in the dtype that steps compute in, inside the `with` block.

    It takes less memory then, and no step makes a copy of it. It is cast back at the end, so that
    nothing is lost where the dtype holds all its values.

    Args:
        model: The model. What is frozen of it at first must not be changed inside.
        dtype: The dtype.
    """
    given, trained = parameters(model), dict(tree_flatten(model.trainable_parameters()))
    before = {name: given[name].dtype for name in _cast_names(model, dtype) if name not in trained}
    _update(model, {name: given[name].astype(dtype) for name in before})
    del given, trained
    try:
        yield
    finally:
        cast = parameters(model)
        _update(model, {name: cast[name].astype(own) for name, own in before.items()})


def _cast_names(model: nn.Module, dtype: mx.Dtype) -> list[str]:
    """The names of the parameters of other dtypes that a step casts to a dtype."""
    unchanged = fixed_dtype_names(model) | _ternary_masters(model) | set(running_statistics(model))
    return [
        name
        for name, array in parameters(model).items()
        if mx.issubdtype(array.dtype, mx.floating)
        and array.dtype != dtype
        and name not in unchanged
    ]


def _ternary_masters(model: nn.Module) -> set[str]:
    return {
        f"{path}.weight"
        for path, matrix in matrices(model).items()
        if matrix.is_ternary and matrix.holds_floats
    }


def _update(model: nn.Module, arrays: dict[str, mx.array]) -> None:
    model.update(tree_unflatten(list(arrays.items())))
