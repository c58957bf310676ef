"""Cutting into many parts: the parts equal MLX's, and the gradient is as small as the array."""

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend.graph import graph_of
from mlx_mmfree.ops.splitting import positions, split_many


@pytest.mark.parametrize("length", [1, 2, 8, 9, 63, 64, 65, 600])
def test_parts_are_those_of_mlx(length: int) -> None:
    x = mx.random.normal((2, length, 3))
    for cuts in (range(1, length), range(2, length, 5), range(0)):
        want = mx.split(x, list(cuts), axis=1) if cuts else [x]
        got = split_many(x, cuts, axis=1)
        assert len(got) == len(want)
        assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert [part.shape for part in positions(x.swapaxes(0, 1), axis=0)] == [(1, 2, 3)] * length


def test_nothing_has_no_positions() -> None:
    assert positions(mx.zeros((2, 0, 3)), axis=1) == []


def test_the_gradient_takes_the_memory_of_the_array() -> None:
    def gradient(x: mx.array) -> mx.array:
        return mx.grad(lambda x: sum((part**3).sum() for part in positions(x, axis=1)))(x)

    def nbytes(length: int) -> int:
        x = mx.random.normal((1, length, 4))
        mx.eval(x)
        graph = graph_of([gradient(x)], [x])
        return sum(graph.arrays[index].nbytes for node in graph.nodes for index in node.outputs)

    x = mx.random.normal((2, 100, 3))
    assert mx.allclose(gradient(x), 3 * x**2, rtol=1e-5)
    # a level more for eight times as many parts
    assert nbytes(1024) < 1.5 * 8 * nbytes(128)
