"""Perplexity against a plain computation, token by token."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.evaluation import measure_perplexity


class Bigram:
    """A model whose logits depend on the current token only."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).normal(size=(11, 11)).astype(np.float32)

    def __call__(self, tokens: mx.array) -> tuple[mx.array, Any]:
        return mx.array(self.table)[tokens], ()


@pytest.mark.parametrize("count", [2, 9, 17, 100])
@pytest.mark.parametrize("length", [1, 4, 8])
def test_every_token_but_the_first_counts_once(count: int, length: int) -> None:
    model = Bigram()
    tokens = np.random.default_rng(count).integers(0, 11, count).astype(np.int32)
    result = measure_perplexity(model, tokens, 50, length=length, batch_size=3)
    table = model.table.astype(np.float64)
    table -= np.log(np.exp(table).sum(1, keepdims=True))
    want = -sum(table[a, b] for a, b in itertools.pairwise(tokens))
    assert result.tokens == count - 1
    assert result.nats == pytest.approx(want, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(want / (count - 1)), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(want / math.log(2) / 50, rel=1e-5)
