"""What training makes small."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..models import Decoder
from ..ops import cross_entropy, long_sum
from .batches import Batch

Loss = Callable[[Decoder, Batch], mx.array]
"""Maps model and batch to the sum of the losses of its learned tokens, float32 `()`."""


def batch_logits(model: Decoder, batch: Batch) -> mx.array:
    """The logits of a batch, `(B, L, V)`; packed samples do not see each other."""
    arrays = {"valid": batch.valid, "starts": batch.starts}
    masks: dict[str, Any] = {
        name: mx.array(array) for name, array in arrays.items() if array is not None
    }
    logits, _ = model(mx.array(batch.inputs), **masks)
    return logits


def next_token_loss(model: Decoder, batch: Batch) -> mx.array:
    """Sum of the cross-entropies of the learned tokens given the ones before, in nats."""
    losses = cross_entropy(batch_logits(model, batch), mx.array(batch.targets))
    return long_sum(losses * mx.array(batch.weights))
