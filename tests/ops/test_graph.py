"""The graph of arrays that are yet to be computed."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree import native
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.ops import gated_activation, rms_norm, rms_norm_quantize
from mlx_mmfree.ops.backend.graph import dispatches, graph_of
from tests.graph import launches

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason="the compiled extension reads the graph"
)


def test_operations_stand_after_those_they_read() -> None:
    x, y = mx.ones((3, 4)), mx.ones((4, 2))
    mx.eval(x, y)
    graph = graph_of([mx.exp(x @ y), x], [y])
    assert [node.name for node in graph.nodes] == ["Matmul", "Exp"]
    product, result = graph.nodes
    assert product.inputs == [graph.results[1], 0] and result.inputs == product.outputs
    assert graph.results[0] == result.outputs[0]
    leaf, made = graph.arrays[0], graph.arrays[graph.results[0]]
    assert (leaf.nbytes, leaf.shape, leaf.dtype) == (32, (4, 2), mx.float32)
    assert (made.nbytes, made.shape) == (24, (3, 2))
    assert mx.array_equal(made, mx.exp(x @ y)) and mx.array_equal(leaf, y)
    # an operation of MLX does not say what it was called with
    assert product.given is None and product.options == []


def test_dispatches_of_copies() -> None:
    """A GPU copies each part of a concatenation, fills what is padded before it copies, and finds where
    an update goes before it writes."""
    x = mx.ones((3, 4))
    results = [mx.concatenate([x, x, x]), mx.pad(x, [(0, 1), (0, 0)]), mx.exp(x)]
    results.append(mx.slice_update(x, mx.ones((1, 4)), mx.array([1]), (0,)))
    nodes = graph_of(results, [x]).nodes
    found = {node.name: dispatches(node.name, len(node.inputs)) for node in nodes}
    wanted = {"Concatenate": 3, "Pad": 2, "Exp": 1, "DynamicSliceUpdate": 2}
    assert found | wanted == found
    assert launches(results) == wanted


def test_it_ends_at_leaves_whether_known_or_not() -> None:
    leaf = mx.zeros((5,)) + 1
    graph = graph_of([leaf * 2], [leaf])
    assert "Add" not in [node.name for node in graph.nodes]
    assert "Add" in [node.name for node in graph_of([leaf * 2]).nodes]


def test_an_operation_with_several_results_stands_there_once() -> None:
    first, second = mx.divmod(mx.zeros((5,)) + 1, mx.array(2.0))
    names = [node.name for node in graph_of([second, first]).nodes]
    assert names.count("DivMod") == 1
    node = next(n for n in graph_of([second, first]).nodes if n.name == "DivMod")
    assert len(node.outputs) == 2


def test_a_kernel_says_what_it_was_called_with() -> None:
    x, scale = mx.ones((2, 8)), mx.ones((8,))
    (plain,) = graph_of([rms_norm(x, None, eps=0.5)], [x]).nodes
    assert (plain.name, plain.given, plain.options) == ("RmsNorm", [True, False], [0.5])
    (scaled,) = graph_of([rms_norm(x, scale, eps=0.5)], [x, scale]).nodes
    assert scaled.given == [True, True] and scaled.inputs == [0, 1]
    nodes = graph_of(list(rms_norm_quantize(x)), [x]).nodes
    assert [(node.name, node.options) for node in nodes] == [("RmsNormQuantize", [None, False])]
    (gated,) = graph_of([gated_activation(x, x, "silu")], [x]).nodes
    assert gated.options == ["silu"]


def test_a_long_chain_is_walked() -> None:
    x = mx.zeros((1,))
    for _ in range(5_000):
        x = -x
    assert len(graph_of([x]).nodes) > 5_000
    mx.eval(x)
    assert graph_of([x]).nodes == []


def test_gradients_of_compiled_kernels_are_in_it() -> None:
    layer = BitLinear(64, 32)
    x = mx.random.normal((8, 64))
    _, gradient = nn.value_and_grad(layer, lambda layer, x: layer(x).sum())(layer, x)
    graph = graph_of([gradient["weight"]], [layer.weight, x])
    assert "Matmul" in {node.name for node in graph.nodes}
    assert graph.arrays[graph.results[0]].shape == (32, 64)


def names_of(results: list[mx.array], leaves: list[mx.array]) -> list[str]:
    return [node.name for node in graph_of(results, leaves).nodes]


def test_a_fused_graph_is_one_operation_of_the_same_results() -> None:
    weight = mx.random.normal((8,))
    mx.eval(weight)
    x, y = mx.random.normal((3, 8)), mx.random.normal((3, 8))
    mx.eval(x, y)

    def results(x: mx.array, y: mx.array) -> list[mx.array]:
        normed = rms_norm(x, weight, eps=1e-6)
        quotient, rest = mx.divmod(normed, y)
        # one of two results is not asked for, an array is read twice, and a leaf is a result
        return [quotient * quotient + rms_norm(rest, None, eps=0.5), normed, y]

    want = results(x, y)
    mx.eval(want)
    got = native.kernels().joined(results(x, y), [x, y])
    assert names_of(got, [x, y]) == ["Joined"]
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_has_no_operations_is_not_fused() -> None:
    x = mx.ones((3,))
    mx.eval(x)
    (same,) = native.kernels().joined([x], [x])
    assert names_of([same], []) == []


def test_streams_are_not_fused() -> None:
    x = mx.ones((3,))
    mx.eval(x)
    with mx.stream(mx.new_stream(mx.Device(mx.cpu))):
        y = mx.exp(x)
    (z,) = native.kernels().joined([mx.abs(y)], [x])
    assert names_of([z], [x]) == ["Exp", "Abs"]


def test_a_fused_operation_outlives_its_arrays() -> None:
    """The arrays that it keeps last until it has run, though nothing else holds them."""
    x = mx.random.normal((64, 256))
    mx.eval(x)
    for _ in range(20):
        weight = mx.random.normal((256, 256))
        mx.eval(weight)
        want = x @ weight @ weight
        mx.eval(want)
        (y,) = native.kernels().joined([x @ weight @ weight], [x])
        mx.async_eval(y)
        del weight
        assert mx.array_equal(y, want)


def test_fused_operations_write_in_place_what_nothing_else_holds() -> None:
    mx.clear_cache()
    count = 2**20

    def grown(x: mx.array) -> mx.array:
        (y,) = native.kernels().joined([mx.abs(mx.negative(x))], [x])
        return y

    x = mx.ones((count,))
    mx.eval(x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    x = grown(x)
    mx.eval(x)
    assert mx.get_peak_memory() - before < 4 * count // 2
    x_after = x
    y = grown(x)
    mx.eval(y)
    assert mx.array_equal(x_after, mx.ones((count,))) and mx.array_equal(y, x_after)


def test_operations_of_mlx_are_fused_that_copy() -> None:
    """Their results are asked for the stream, as where a reshape has to copy."""
    x = mx.random.normal((4, 6, 8))
    mx.eval(x)

    def turned(x: mx.array) -> mx.array:
        first, second = mx.split(x.swapaxes(0, 2), 2, axis=1)
        return mx.concatenate([first.reshape(-1), mx.abs(second).reshape(-1)])

    (y,) = native.kernels().joined([turned(x)], [x])
    assert names_of([y], [x]) == ["Joined"]
    assert mx.array_equal(y, turned(x))
