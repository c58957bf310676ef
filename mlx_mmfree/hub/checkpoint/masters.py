"""Float master weights for a model whose ternary matrices are packed without them.

What the masters were before they were rounded is lost. Those that are made up lie in the middle of
what each trit stands for, so that the model computes the same, and training goes on from there.
"""

import mlx.core as mx
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...layers import BitLinear, PackedBitLinear, PackedLinear, TiedBitLinear
from ...models import Decoder, architecture_of
from ...ops import unpack_ternary
from .forms.affine_format import QuantizedModule
from .skeleton import parameters

MASTERS_FOLDER = "masters"
"""Where a training run keeps the float weights of its model, beside the packed one."""


def with_masters(packed: Decoder) -> Decoder:
    """The training form of a packed model; other quantised modules stay as they are.

    Args:
        packed: A model with packed ternary linears. Its other parameters are shared.

    Raises:
        CheckpointError: Its head shares the weight of an embedding in few bits.
    """
    config = packed.config
    model: Decoder = architecture_of(config).build(config)
    training = dict(model.named_modules())
    kept, made = [], set()
    for path, module in packed.named_modules():
        if isinstance(module, PackedLinear | QuantizedModule):
            kept.append((path, module))
        # a tied head reads the embedding, which has kept its floats
        elif isinstance(module, PackedBitLinear) and isinstance(training[path], BitLinear):
            training[path].weight = master_weight(module)
            made.add(f"{path}.weight")
    if kept and any(isinstance(module, TiedBitLinear) for module in training.values()):
        raise CheckpointError(
            "[load] 'rebuild_masters' must be left out for a head that shares an embedding in few bits."
        )
    model.update_modules(tree_unflatten(kept))
    own = parameters(model).keys()
    shared = [(k, v) for k, v in parameters(packed).items() if k in own and k not in made]
    model.update(tree_unflatten(shared))
    return model


def masters_bytes(packed: Decoder, dtype: mx.Dtype) -> int:
    """Bytes of what `with_masters` gives, in a float dtype."""
    size = sum(array.nbytes for array in parameters(packed).values())
    for module in packed.modules():
        if isinstance(module, PackedBitLinear):
            size += module.output_dims * module.input_dims * dtype.size - module.weight.nbytes
    return size


def master_weight(packed: PackedBitLinear) -> mx.array:
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
