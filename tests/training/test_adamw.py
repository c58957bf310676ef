"""AdamW in one operation has the bits of MLX's."""

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from mlx_mmfree.ops import adamw
from mlx_mmfree.training.optimizer import AdamW
from tests.tolerances import TOLERANCE, relative_error

SHAPES = [(), (5,), (1, 300), (37, 259), (3, 4, 5)]


def gradient(shape: tuple[int, ...], turned: bool) -> mx.array:
    if turned and len(shape) == 2:
        return mx.random.normal(shape[::-1]).T
    return mx.random.normal(shape)


def trained(kind: type, turned: bool, dtype: mx.Dtype, **options: Any) -> list[mx.array]:
    mx.random.seed(1)
    optimizer = kind(learning_rate=1e-2, **options)
    weights = {str(n): mx.random.normal(shape).astype(dtype) for n, shape in enumerate(SHAPES)}
    for step in range(4):
        optimizer.learning_rate = mx.array(0.01 * (step + 1))
        gradients = {
            str(n): gradient(shape, turned).astype(dtype) for n, shape in enumerate(SHAPES)
        }
        weights = optimizer.apply_gradients(gradients, weights)
        mx.eval(weights, optimizer.state)
    states = [optimizer.state[name] for name in weights]
    assert [set(state) for state in states] == [{"m", "v"}] * len(SHAPES)
    return [*weights.values(), *(state[key] for state in states for key in ("m", "v"))]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias_correction": True, "weight_decay": 0.1}], ids=str)
def test_bits_are_those_of_mlx(options: dict[str, Any], dtype: mx.Dtype, turned: bool) -> None:
    got = trained(AdamW, turned, dtype, **options)
    want = trained(optim.AdamW, turned, dtype, **options)
    for own, other in zip(got, want, strict=True):
        assert own.dtype == dtype
        assert mx.array_equal(own, other)


def arrays(rows: int = 37, columns: int = 259) -> list[mx.array]:
    mx.random.seed(2)
    w, g, m = (mx.random.normal((rows, columns)) for _ in range(3))
    return [w, g, m, mx.random.uniform(shape=w.shape), mx.array([0.99, 0.02, 1.5])]


def test_equals_the_equation() -> None:
    given = arrays()
    w, g, m, v, (a, b, c) = (np.array(array, np.float64) for array in given)
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g**2
    want = [a * w - b * m / (c * np.sqrt(v) + 1e-3), m, v]
    got = adamw(*given, betas=(0.9, 0.95), eps=1e-3)
    for own, other in zip(got, want, strict=True):
        assert relative_error(own, mx.array(other)) <= TOLERANCE[mx.float32]


def test_arrays_that_are_still_held_keep_their_values() -> None:
    given = arrays()
    before = [np.array(array) for array in given]
    mx.eval(adamw(*given, betas=(0.9, 0.95), eps=1e-3))
    assert all(np.array_equal(x, y) for x, y in zip(before, given, strict=True))
