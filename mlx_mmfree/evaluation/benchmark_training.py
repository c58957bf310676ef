"""A training step with straight-through gradients, against its matrix products alone in float32."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers.matrix import matrices
from ..models import find
from ..ops import cross_entropy, long_mean
from ..platform.allocator import keep_freed_memory
from ..platform.threads import thread_count
from .benchmark_record import BLAS, Record

Product = tuple[mx.array, mx.array]


def run(
    name: str, config: Mapping[str, Any], batch_size: int, length: int, rounds: int
) -> tuple[list[Record], dict]:
    """Measures loss and gradients of one batch, in turn with the same products by themselves.

    Args:
        name: Shown with the result.
        config: As a Hub `config.json`; the float weights are random.
        batch_size: Sequences of a batch.
        length: Tokens of each.
        rounds: How often everything is measured, after a first time.
    """
    keep_freed_memory()
    architecture = find(config["model_type"])
    model = architecture.build(architecture.config.from_hub(config))
    mx.eval(model.parameters())
    tokens = mx.random.randint(0, model.vocab_size, (batch_size, length + 1))
    step = nn.value_and_grad(model, _loss)
    products, macs = _products(model, batch_size * length)
    own, limit = [], []
    for n in range(-1, rounds):
        plain = _seconds(lambda: [a @ b for a, b in products])
        seconds = _seconds(lambda: step(model, tokens))
        if n >= 0:
            own.append(seconds)
            limit.append(plain)
    record = Record(
        f"{name}: training step",
        thread_count(),
        BLAS,
        0,
        macs,
        tuple(own),
        tuple(limit),
        "tokens",
        batch_size * length,
    )
    return [record], {}


def _loss(model: nn.Module, tokens: mx.array) -> mx.array:
    logits, _ = model(tokens[:, :-1])
    return long_mean(cross_entropy(logits, tokens[:, 1:]))


def _products(model: nn.Module, rows: int) -> tuple[list[Product], int]:
    """Forward, and the gradients of input and weight, of every linear layer."""
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


def _seconds(compute: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(compute())
    return time.perf_counter() - start
