"""The compiled kernels as operations with a gradient."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ... import native
from .dispatch import use_any_backend

Kernel = Callable[..., Any]
Arrays = Sequence[mx.array]
Definition = Callable[[Sequence[Any], tuple[Any, ...], Arrays], Arrays]


def native_kernel(name: str, definition: Definition) -> Callable[[], Kernel]:
    """Returns what loads a compiled kernel, whose gradient is that of its definition.

    Args:
        name: The function of the compiled module.
        definition: The operation in differentiable operations. It is called with the list of the
            arrays of a call, `None` for each that was left out, the tuple of its options, and the
            list of its results, which may stand for what has no gradient.
    """

    def on_any_backend(*call: Any) -> list[mx.array]:
        with use_any_backend():
            return list(definition(*call))

    @cache
    def load() -> Kernel:
        module = native.kernels()
        getattr(module, f"define_{name}")(on_any_backend)
        kernel: Kernel = getattr(module, name)
        return kernel

    return load
