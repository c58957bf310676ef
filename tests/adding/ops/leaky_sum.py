"""A new operation: a sum along a sequence that forgets, with a backend beside its definition."""

from collections.abc import Iterator

import mlx.core as mx

from mlx_mmfree.ops.backend.cost import Call, Cost, work
from mlx_mmfree.ops.backend.dispatch import Backend, Example, Operation


def leaky_sum(x: mx.array, *, decay: float) -> mx.array:
    r"""Sums `(B, L, D)` along the sequence, :math:`y_t = d\,y_{t-1} + x_t`, in float32."""
    y: mx.array = OPERATION(x, decay)
    return y


def reference(x: mx.array, decay: float) -> mx.array:
    """The definition: one position after the other."""
    sums = [x[:, 0].astype(mx.float32)]
    for t in range(1, x.shape[1]):
        sums.append(decay * sums[-1] + x[:, t].astype(mx.float32))
    return mx.stack(sums, axis=1)


def chunked(x: mx.array, decay: float) -> mx.array:
    """One product with the powers of the decay."""
    positions = mx.arange(x.shape[1])
    distance = positions[:, None] - positions
    weights = mx.where(distance >= 0, mx.power(decay, mx.maximum(distance, 0)), 0.0)
    return weights @ x.astype(mx.float32)


def _unsupported(x: mx.array, decay: float) -> str | None:
    return None if decay > 0 else "its powers need a decay above zero"


def _examples() -> Iterator[Example]:
    for dtype in (mx.float32, mx.float16):
        yield Example((mx.ones((2, 5, 8), dtype), 0.5))


def _cost(call: Call) -> Cost:
    count = call.inputs[0].size
    return Cost(work(multiply=count, add=count))


OPERATION = Operation(
    "leaky_sum",
    _examples,
    costs={"LeakySum": _cost},
    chunked=Backend(chunked, _unsupported),
    reference=reference,
)
