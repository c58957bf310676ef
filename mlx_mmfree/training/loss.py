"""The loss that training minimises: the cross-entropy of the next token."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers.matrix import matrix_of
from ..models import Decoder
from ..ops import cross_entropy, long_sum
from .batches import Batch
from .loss_in_blocks import losses_in_blocks

Loss = Callable[[Decoder, Batch], mx.array]
"""Maps a model and a batch to the sum of the losses of the learned tokens, float32 `()`."""

_WHOLE = 2**25
"""The most logits that are kept for the backward pass, 128 MB of float32."""

_BLOCK = 2**23
"""The number of logits in a block otherwise. On a CPU, MLX allocates what the next operations need
before they run, so that several blocks are held.
"""


def batch_logits(model: Decoder, batch: Batch) -> mx.array:
    """The logits of a batch, `(B, L, V)`. Packed samples do not see each other."""
    return model.logits(_hidden(model, batch))


def next_token_loss(model: Decoder, batch: Batch) -> mx.array:
    r"""The sum of the cross-entropies of the learned tokens, in nats.

    .. math::
        -\sum_{b, t} w_{bt} \log p(y_{bt} \mid x_{b, \le t})

    for the batch's inputs :math:`x`, targets :math:`y` and weights :math:`w`. The logits of many tokens
    over a large vocabulary are computed in blocks, and again in the backward pass, so that the memory
    for them does not grow with the batch.
    """
    return long_sum(token_losses(model, batch))


def token_losses(model: Decoder, batch: Batch) -> mx.array:
    """The cross-entropy of each learned token, 0 at the other places, in nats, float32 `(B, L)`."""
    losses = _losses(model, _hidden(model, batch), mx.array(batch.targets))
    return losses * mx.array(batch.weights)


def _hidden(model: Decoder, batch: Batch) -> mx.array:
    arrays = {"valid": batch.valid, "starts": batch.starts}
    masks: dict[str, Any] = {
        name: mx.array(array) for name, array in arrays.items() if array is not None
    }
    hidden, _ = model.known_hidden(mx.array(batch.inputs), **masks)
    return hidden


def _losses(model: Decoder, hidden: mx.array, targets: mx.array) -> mx.array:
    """The loss of each target, of the shape of `targets`."""
    if targets.size * model.vocab_size <= _WHOLE:
        return cross_entropy(model.logits(hidden), targets)
    losses = losses_in_blocks(
        _head_modules(model),
        lambda hidden, targets: cross_entropy(model.logits(hidden), targets),
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1),
        max(_BLOCK // model.vocab_size, 1),
    )
    return losses.reshape(targets.shape)


def _head_modules(model: Decoder) -> list[nn.Module]:
    """The modules whose parameters the logits depend on."""
    if "head" not in model:
        return [model.embed]
    matrix = matrix_of(model.head)
    is_shared = matrix is None or matrix.storage == "elsewhere"
    return [model.embed, model.head] if is_shared else [model.head]
