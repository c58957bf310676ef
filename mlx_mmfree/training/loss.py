"""The loss that training minimises: the cross-entropy of the next token."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..models import Decoder
from ..ops import cross_entropy, long_sum
from .batches import Batch

Loss = Callable[[Decoder, Batch], mx.array]
"""Maps a model and a batch to the sum of the losses of the learned tokens, float32 `()`."""


def batch_logits(model: Decoder, batch: Batch) -> mx.array:
    """The logits of a batch, `(B, L, V)`. Packed samples do not see each other."""
    arrays = {"valid": batch.valid, "starts": batch.starts}
    masks: dict[str, Any] = {
        name: mx.array(array) for name, array in arrays.items() if array is not None
    }
    logits, _ = model(mx.array(batch.inputs), **masks)
    return logits


def next_token_loss(model: Decoder, batch: Batch) -> mx.array:
    r"""The sum of the cross-entropies of the learned tokens, in nats.

    .. math::
        -\sum_{b, t} w_{bt} \log p(y_{bt} \mid x_{b, \le t})

    for the batch's inputs :math:`x`, targets :math:`y` and weights :math:`w`.
    """
    losses = cross_entropy(batch_logits(model, batch), mx.array(batch.targets))
    return long_sum(losses * mx.array(batch.weights))
