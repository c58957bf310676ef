"""A training step with straight-through gradients, beside its matrix products alone in float32."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers.matrix import matrices
from ..models import find
from ..ops import cross_entropy, long_mean
from ..platform.allocator import keep_freed_memory
from .benchmark_limits import computing_threads
from .benchmark_record import BLAS, Record
from .benchmark_rounds import elapsed, in_turn

Product = tuple[mx.array, mx.array]


def run(
    name: str, config: Mapping[str, Any], batch_size: int, length: int, rounds: int
) -> tuple[list[Record], dict]:
    """Measures the loss and gradients of one batch, in turn with its matrix products alone.

    Args:
        name: Name to show with the result.
        config: Configuration, as in a `config.json` of the Hub. The float weights are random.
        batch_size: Number of sequences in the batch.
        length: Number of tokens in a sequence.
        rounds: Number of measurements, after one that does not count.
    """
    keep_freed_memory()
    architecture = find(config["model_type"])
    model = architecture.build(architecture.config.from_hub(config))
    mx.eval(model.parameters())
    tokens = mx.random.randint(0, model.vocab_size, (batch_size, length + 1))
    step = nn.value_and_grad(model, mean_loss)
    products, macs = _products(model, batch_size * length)
    own, limit = in_turn(
        rounds,
        lambda: elapsed(lambda: mx.eval([a @ b for a, b in products])),
        lambda: elapsed(lambda: mx.eval(step(model, tokens))),
    )
    record = Record(
        f"{name}: training step",
        threads=computing_threads(),
        limit=BLAS,
        bytes=0,
        macs=macs,
        seconds=own,
        limit_seconds=limit,
        unit="tokens",
        count=batch_size * length,
    )
    return [record], {}


def mean_loss(model: nn.Module, tokens: mx.array) -> mx.array:
    """The mean cross-entropy of the next token in rows of token ids `(B, L + 1)`."""
    logits, _ = model(tokens[:, :-1])
    return long_mean(cross_entropy(logits, tokens[:, 1:]))


def _products(model: nn.Module, rows: int) -> tuple[list[Product], int]:
    """The factors of the forward and both backward products of each linear layer, and their cost."""
    pairs: list[Product] = []
    macs = 0
    for matrix in matrices(model).values():
        if matrix.storage != "floats" or matrix.is_embedding:
            continue
        weight = matrix.layer.weight.astype(mx.float32)
        outputs, inputs = weight.shape
        x, dy = mx.random.normal((rows, inputs)), mx.random.normal((rows, outputs))
        mx.eval(x, dy, weight)
        pairs += [(x, weight.T), (dy, weight), (dy.T, x)]
        macs += 3 * rows * outputs * inputs
    return pairs, macs
