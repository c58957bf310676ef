"""Makes float master weights for a model whose ternary matrices are packed without them.

What the masters were before they were rounded is lost. The new ones lie in the middle of what each trit
stands for. The model computes the same with them, and training goes on from there.
"""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...layers.matrix import matrices
from ...models import Decoder
from ...ops import unpack_ternary

MASTERS_FOLDER = "masters"
"""The folder of the float weights beside that of the packed model of a training run."""


class Masters:
    """The masters that packed linears are to get.

    Args:
        training: The training forms of these linears by their paths, with the same norms.

    Attributes:
        training: The training forms.
    """

    def __init__(self, training: Mapping[str, nn.Module]):
        self.training = training

    def nbytes(self, dtype: mx.Dtype) -> int:
        """The number of bytes of the matrices that `make` makes, in a float dtype."""
        weights = (module.weight for module in self.training.values() if "weight" in module)
        return sum(weight.size * dtype.size for weight in weights)

    def make(self, model: Decoder) -> None:
        """Gives the linears of a model their training form, in place. Nothing else changes.

        Raises:
            CheckpointError: The head shares the weight of an embedding in few bits.
        """
        modules = dict(model.named_modules())
        few_bits = any(
            matrix.storage != "floats" and not matrix.is_ternary
            for matrix in matrices(model).values()
        )
        for path, module in self.training.items():
            packed = modules[path]
            if "weight" in module:
                module.weight = master_weight(packed)
            # a tied head reads the embedding, which has kept its floats
            elif few_bits:
                raise CheckpointError(
                    "[load] 'rebuild_masters' must be left out for a head that shares an embedding "
                    "in few bits, but was given. Load the checkpoint that it was made from."
                )
            if "bias" in packed:
                module.bias = packed.bias
        model.update_modules(tree_unflatten(list(self.training.items())))


def master_weight(packed: nn.Module) -> mx.array:
    r"""A float matrix that `ops.ternarize` turns into the packed one.

    .. math::
        w = t\,m / d

    with the trits :math:`t`, their scale :math:`m` and the share :math:`d` of trits that are not zero.
    So the mean of :math:`|w|` is :math:`m`, except for the rounding of that mean.

    Returns:
        float32 `(output_dims, input_dims)`.
    """
    trits = unpack_ternary(packed.weight, packed.input_dims)
    share = (trits != 0).astype(mx.int64).sum().item() / trits.size
    return trits * (packed.scale / (share or 1.0))
