"""The parameters of a model, by their names in memory."""

from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..ops.float_dtypes import FLOATS
from .matrix import matrices

Model = TypeVar("Model", bound=nn.Module)


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """All parameters of a model by their names."""
    return dict(tree_flatten(model.parameters()))


def kept_names(model: nn.Module) -> set[str]:
    """Names of the parameters whose dtype never changes: those of packed matrices."""
    return {f"{path}.{name}" for path, matrix in matrices(model).items() for name in matrix.kept}


def converted(model: Model, dtype: mx.Dtype | None) -> Model:
    """The model with its floats in another dtype, in place; `None` keeps them."""
    kept = kept_names(model)
    modules = dict(model.named_modules())
    for name, array in parameters(model).items():
        if dtype is not None and array.dtype in FLOATS and name not in kept:
            path, _, key = name.rpartition(".")
            array = array.astype(dtype)
            setattr(modules[path], key, array)
        mx.eval(array)
    return model
