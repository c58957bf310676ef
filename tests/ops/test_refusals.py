"""Wrong arguments are refused in the same words, whether a backend checks them itself or not."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import mlx_mmfree.ops as ops
from mlx_mmfree.ops import use_backend
from mlx_mmfree.ops.ternary import packed_width

X = mx.ones((3, 32))
NORM = mx.ones((32,))


def matrix(outputs: int, inputs: int, dtype: mx.Dtype = mx.uint32) -> mx.array:
    return mx.zeros((outputs, packed_width(inputs)), dtype)


def projection(weight: mx.array, norm: mx.array | None = None) -> ops.Projection:
    return ops.Projection(weight, mx.ones((1,)), norm)


FITS = projection(matrix(5, 32))
NORMED = projection(matrix(5, 32), NORM)


def step(*, capacity: int = 4, width: int = 8 * 6, **changes: Any) -> object:
    given: dict[str, Any] = {
        "projected": mx.ones((2, 1, width)),
        "keys": mx.ones((2, 1, capacity, 8)),
        "values": mx.ones((2, 1, capacity, 8)),
        "positions": mx.zeros((2, 4), mx.int32),
        "num_heads": 4,
    }
    return ops.attention_step(**given | changes)


def recur(gates: tuple[int, ...], state: tuple[int, ...]) -> object:
    return ops.mlgru_step(mx.ones(gates), mx.ones(state), mx.ones(state[-1:]), eps=1e-6)


CALLS: dict[str, Callable[[], object]] = {
    "bit_linear: no matrix": lambda: ops.bit_linear(X, []),
    "bit_linear: another width": lambda: ops.bit_linear(X, [FITS, projection(matrix(5, 64))]),
    "bit_linear: another dtype": lambda: ops.bit_linear(X, [projection(matrix(5, 32, mx.int32))]),
    "bit_linear: a vector": lambda: ops.bit_linear(X, [projection(matrix(1, 32)[0])]),
    "bit_linear: a norm too many": lambda: ops.bit_linear(X, [FITS, NORMED]),
    "bit_linear: a norm too few": lambda: ops.bit_linear(X, [NORMED, FITS], eps=1e-6),
    "bit_linear: no epsilon": lambda: ops.bit_linear(X, [FITS], norm=NORM),
    "bit_linear: no weight of a norm": lambda: ops.bit_linear(X, [FITS], norm_eps=1e-6),
    "bit_linear: a wide residual": lambda: ops.bit_linear(X, [FITS], residual=mx.ones((3, 6))),
    "bit_linear: a flat residual": lambda: ops.bit_linear(X, [FITS], residual=mx.ones((5,))),
    "bit_linear: an odd input": lambda: ops.bit_linear(mx.ones((3, 33)), [FITS], gate="silu"),
    "bit_linear: a number": lambda: ops.bit_linear(mx.array(1.0), [FITS]),
    "bit_linear: no inputs": lambda: ops.bit_linear(mx.ones((3, 0)), [FITS]),
    "attention_step: three axes": lambda: step(keys=mx.ones((2, 4, 8))),
    "attention_step: no heads": lambda: step(num_heads=0),
    "attention_step: no dims": lambda: step(keys=mx.ones((2, 1, 4, 0))),
    "attention_step: a wide token": lambda: step(width=8 * 7),
    "attention_step: two tokens": lambda: step(projected=mx.ones((2, 2, 8 * 6))),
    "attention_step: other values": lambda: step(values=mx.ones((2, 1, 4, 6))),
    "attention_step: no space": lambda: step(capacity=3),
    "attention_step: one norm": lambda: step(query_norm=mx.ones(8)),
    "attention_step: other rows": lambda: step(positions=mx.zeros((3, 4), mx.int32)),
    "attention_step: flat positions": lambda: step(positions=mx.zeros((2, 1, 4), mx.int32)),
    "attention_step: no window": lambda: step(window=0),
    "attention_step: negative sinks": lambda: step(window=2, sinks=-1),
    "attention_step: far sinks": lambda: step(window=2**31 - 1, sinks=1),
    "attention_step: a far window": lambda: step(window=2**40),
    "mlgru_step: two axes": lambda: recur((2, 12), (2, 4)),
    "mlgru_step: no channels": lambda: recur((2, 3, 0), (2, 0)),
    "mlgru_step: other rows": lambda: recur((2, 3, 12), (3, 4)),
    "mlgru_step: a wide state": lambda: recur((2, 3, 12), (2, 5)),
    "mlgru_step: a wide gate": lambda: recur((2, 3, 14), (2, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_refusal(name: str) -> None:
    op = name.partition(":")[0]
    with pytest.raises(ValueError, match=rf"^\[{op}\] '\w+' .*must .*\.$") as by_choice:
        CALLS[name]()
    with use_backend("reference"), pytest.raises(ValueError, match=rf"^\[{op}\]") as by_definition:
        CALLS[name]()
    assert str(by_choice.value) == str(by_definition.value)
