"""Counts the ternary weights that a run changes."""

import mlx.nn as nn
import numpy as np

from ..layers.matrix import matrices

_LOW_BITS = np.uint32(0x55555555)


class TernaryWeights:
    """The ternary weights of a model when it was made, with which later ones are compared.

    Trits are kept packed, in 2 bits each.

    Args:
        model: The model; its ternary layers in their training variant are looked at.

    Attributes:
        names: The paths of these layers, first to last.
    """

    def __init__(self, model: nn.Module):
        found = matrices(model)
        self._matrices = [
            (name, matrix)
            for name, matrix in found.items()
            if matrix.is_ternary and matrix.holds_floats
        ]
        self.names = [name for name, _ in self._matrices]
        self._first = [np.array(matrix.packed_trits()) for _, matrix in self._matrices]

    def metrics(self) -> dict[str, list[float]]:
        """Shares of the trits of each layer, from 0 to 1.

        Returns:
            `zero_trits`, those that are zero, and `flipped_trits`, those that were another one when the
            model was made. Nothing if the model has no such layer.
        """
        if not self._matrices:
            return {}
        zeros, flips = [], []
        for (_, matrix), first in zip(self._matrices, self._first, strict=True):
            now = np.array(matrix.packed_trits())
            count = matrix.output_dims * matrix.input_dims
            padding = now.size * 16 - count
            # a zero has the code 1, and so has the padding
            zeros.append((_count(now & ~(now >> 1)) - padding) / count)
            changed = now ^ first
            flips.append(_count(changed | (changed >> 1)) / count)
        return {"zero_trits": zeros, "flipped_trits": flips}


def _count(words: np.ndarray) -> int:
    """How many of the 2-bit fields have their lower bit set."""
    return int(np.bitwise_count(words & _LOW_BITS).sum(dtype=np.int64))
