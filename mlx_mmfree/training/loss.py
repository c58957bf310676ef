"""What training makes small."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..models import Decoder
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
    logits = batch_logits(model, batch).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, mx.array(batch.targets))
    return (losses * mx.array(batch.weights)).sum()
