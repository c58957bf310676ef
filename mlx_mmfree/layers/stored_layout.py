"""How published files lay out an array whose axes differ from those in memory."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn


class StoredLayout(NamedTuple):
    """The layout of an array on disk.

    A layer says it of its parameters, and of those of its parts, as `stored_layouts`, a mapping from
    their names behind its own path.

    Attributes:
        shape: The shape on disk.
        read: Turns the array on disk into the one in memory.
        write: Turns it back.
    """

    shape: tuple[int, ...]
    read: Callable[[mx.array], mx.array]
    write: Callable[[mx.array], mx.array]

    @classmethod
    def reshaped(cls, shape: tuple[int, ...], in_memory: tuple[int, ...]) -> "StoredLayout":
        """The same numbers in the same order."""
        return cls(shape, lambda x: x.reshape(in_memory), lambda x: x.reshape(shape))

    @classmethod
    def convolution(cls, outputs: int, inputs: int, side: int) -> "StoredLayout":
        """The weight of a convolution as PyTorch has it, in memory a matrix `(O, side * side * I)`."""

        def read(x: mx.array) -> mx.array:
            return mx.moveaxis(x, 1, -1).reshape(outputs, -1)

        def write(x: mx.array) -> mx.array:
            return mx.moveaxis(x.reshape(outputs, side, side, inputs), -1, 1)

        return cls((outputs, inputs, side, side), read, write)


def stored_layouts(model: nn.Module) -> dict[str, StoredLayout]:
    """Those of all layers of a model, by the names of the parameters in memory."""
    return {
        f"{path}.{name}" if path else name: layout
        for path, module in model.named_modules()
        for name, layout in getattr(module, "stored_layouts", {}).items()
    }
