"""Float master weights for a model whose ternary matrices are packed without them.

What the masters were before they were rounded is lost. Those that are made up lie in the middle of
what each trit stands for, so that the model computes the same, and training goes on from there.
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
"""Where a training run keeps the float weights of its model, beside the packed one."""


def make_masters(model: Decoder, training: Mapping[str, nn.Module]) -> None:
    """Gives packed linears their training form, in place; other quantised modules stay as they are.

    Args:
        model: A model with packed ternary linears.
        training: By their paths, the training forms of these, with the same norms.

    Raises:
        CheckpointError: Its head shares the weight of an embedding in few bits.
    """
    modules = dict(model.named_modules())
    few_bits = any(
        matrix.storage != "floats" and not matrix.is_ternary for matrix in matrices(model).values()
    )
    for path, module in training.items():
        packed = modules[path]
        if "weight" in module:
            module.weight = master_weight(packed)
        # a tied head reads the embedding, which has kept its floats
        elif few_bits:
            raise CheckpointError(
                "[load] 'rebuild_masters' must be left out for a head that shares an embedding in few "
                "bits."
            )
        if "bias" in packed:
            module.bias = packed.bias
    model.update_modules(tree_unflatten(list(training.items())))


def masters_bytes(training: Mapping[str, nn.Module], dtype: mx.Dtype) -> int:
    """Bytes of the matrices that `make_masters` makes, in a float dtype."""
    weights = (module.weight for module in training.values() if "weight" in module)
    return sum(weight.size * dtype.size for weight in weights)


def master_weight(packed: nn.Module) -> mx.array:
    r"""A float matrix that `ops.ternarize` turns into the packed one.

    .. math::
        w = t\,m / d

    with the trits :math:`t`, their scale :math:`m` and the share :math:`d` of those that are not zero,
    so that the mean of :math:`|w|` is :math:`m`, but for the rounding of that mean.

    Returns:
        float32 `(output_dims, input_dims)`.
    """
    trits = unpack_ternary(packed.weight, packed.input_dims)
    share = (trits != 0).astype(mx.int64).sum().item() / trits.size
    return trits * (packed.scale / (share or 1.0))
