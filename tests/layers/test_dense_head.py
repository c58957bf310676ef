"""Heads of every format give what their own call gives, and pass gradients on."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.layers import BitLinear, apply_head
from tests.tolerances import TOLERANCE, relative_error

HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 50),
    "embedding": lambda: nn.Embedding(50, 64),
    "1 bit": lambda: nn.QuantizedLinear(64, 50, group_size=64, bits=1),
    "4 bits": lambda: nn.QuantizedLinear(64, 50, group_size=32, bits=4),
    "6 bits, embedding": lambda: nn.QuantizedEmbedding(50, 64, group_size=64, bits=6),
    "3 bits": lambda: nn.QuantizedLinear(64, 50, group_size=32, bits=3),
    "ternary": lambda: BitLinear(64, 50),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_head(name: str, dtype: mx.Dtype) -> None:
    mx.random.seed(0)
    head = HEADS[name]()
    head.apply(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a)
    x = mx.random.normal((2, 3, 64)).astype(dtype)

    def call(x: mx.array) -> mx.array:
        return head.as_linear(x) if hasattr(head, "as_linear") else head(x)

    y = apply_head(head, x)
    assert y.dtype == dtype
    tolerance = TOLERANCE[dtype]
    assert relative_error(y, call(x)) <= tolerance

    def gradient(call: Callable[[mx.array], mx.array]) -> mx.array:
        return mx.grad(lambda x: call(x).astype(mx.float32).sum())(x)

    got = gradient(lambda x: apply_head(head, x))
    assert relative_error(got, gradient(call)) <= tolerance


def test_a_head_of_16_bits_can_be_trained() -> None:
    mx.random.seed(1)
    head = nn.Linear(64, 50)
    head.set_dtype(mx.bfloat16)
    x = mx.random.normal((3, 64)).astype(mx.bfloat16)

    def loss(call: Callable[[nn.Module], mx.array]) -> Callable[[nn.Module], mx.array]:
        return lambda head: call(head).astype(mx.float32).square().sum()

    got = nn.value_and_grad(head, loss(lambda head: apply_head(head, x)))(head)[1]
    want = nn.value_and_grad(head, loss(lambda head: head(x)))(head)[1]
    for name in ("weight", "bias"):
        assert got[name].dtype == mx.bfloat16
        assert relative_error(got[name], want[name]) <= TOLERANCE[mx.bfloat16]
