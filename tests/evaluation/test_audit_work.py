"""The cost of single operations, counted by hand."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.evaluation.audit.primitives import VIEWS, cost_of_kernel, cost_of_mlx
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.ops import (
    attention_step,
    depthwise_convolution,
    gated_delta_rule,
    gated_linear_attention,
    layer_norm,
    linear_scan,
    ternary_matmul,
)
from mlx_mmfree.ops.backend.cost import Call, Cost, work
from mlx_mmfree.ops.backend.graph import graph_of
from tests.evaluation.audit_models import needs_graphs

pytestmark = needs_graphs

ROWS, DIMS, OUTPUTS = 3, 32, 5
X, W = mx.ones((ROWS, DIMS)), mx.ones((DIMS, OUTPUTS))
LINEAR = BitLinear(DIMS, OUTPUTS, quantize_activations=False).to_packed()
NORMED = BitLinear(DIMS, OUTPUTS, norm_eps=1e-6).to_packed()
mx.eval(X, W, LINEAR.parameters(), NORMED.parameters())
SIZE, MACS = ROWS * DIMS, ROWS * DIMS * OUTPUTS
HEADS = mx.ones((1, 2, 1, 4))


def cost(results: list[mx.array]) -> tuple[str, Cost]:
    """The name and the cost of the last operation that is no view."""
    graph = graph_of(results)
    node = [node for node in graph.nodes if node.name not in VIEWS][-1]
    inputs, outputs = (
        [graph.arrays[n] for n in indices] for indices in (node.inputs, node.outputs)
    )
    call = Call(node.name, inputs, outputs, node.given, node.options)
    found = cost_of_mlx(call) if node.given is None else cost_of_kernel(call)
    assert found is not None
    return node.name, found


def _gla(gates: mx.array | None) -> Any:
    q = HEADS
    v, state = mx.ones((1, 2, 1, 6)), mx.zeros((1, 2, 4, 6))
    mx.eval(v, state)
    return list(gated_linear_attention(q, q, v, gates, state))


def _delta_rule(**removal: tuple[mx.array, mx.array]) -> list[mx.array]:
    q = HEADS
    v, state = mx.ones((1, 2, 1, 6)), mx.zeros((1, 2, 4, 6))
    mx.eval(v, state)
    return list(gated_delta_rule(q, q, v, None, HEADS, state, **removal))


MAPS, WINDOWS = mx.ones((1, 4, 4, 8)), mx.ones((8, 3, 3, 1))
mx.eval(MAPS, WINDOWS)

# 2 heads with a state of 4 x 6: the state decays, k v is added, and q reads it
STATE = 2 * 4 * 6
COUNTED: list[tuple[str, Callable[[], Any], dict[str, int]]] = [
    ("Sum", lambda: X.sum(-1), {"add": ROWS * (DIMS - 1)}),
    ("Sum", lambda: X.sum(), {"add": SIZE - 1}),
    ("Max", lambda: X.max(0), {"other": SIZE - DIMS}),
    ("CumSum", lambda: mx.cumsum(X, axis=-1), {"add": ROWS * (DIMS - 1)}),
    ("Add", lambda: X + 1, {"add": SIZE}),
    ("Divide", lambda: X / X, {"other": SIZE}),
    ("AsType", lambda: X.astype(mx.float16), {}),
    ("Add", lambda: X.astype(mx.int32) + 1, {"integer": SIZE}),
    ("Less", lambda: X < 1, {"other": SIZE}),
    ("Matmul", lambda: X @ W, {"multiply": MACS, "add": MACS}),
    ("AddMM", lambda: mx.addmm(W[0], X, W), {"multiply": MACS, "add": MACS + ROWS * OUTPUTS}),
    ("Softmax", lambda: mx.softmax(X, axis=-1), {"add": 2 * SIZE - ROWS, "other": 3 * SIZE - ROWS}),
    ("TernaryMatmul", lambda: ternary_matmul(X, LINEAR.weight), {"add": MACS}),
    (
        "TernaryMatmul",
        lambda: ternary_matmul(X, LINEAR.weight, codes=True),
        {"integer": MACS},
    ),
    # without codes, the sums are of floats, and times the scale
    ("BitLinear", lambda: LINEAR(X), {"add": MACS, "multiply": ROWS * OUTPUTS}),
    (
        "BitLinear",
        lambda: NORMED(X),
        {
            "integer": MACS,
            "multiply": ROWS * (3 * DIMS + DIMS + OUTPUTS),
            "add": SIZE,
            # mean and root of the norm; sizes, largest, rounding, bounds and scale of codes; scale
            "other": ROWS * (2 + 4 * DIMS + 1 + 1),
        },
    ),
    ("GatedLinearAttention", lambda: _gla(None), {"multiply": 2 * STATE, "add": 2 * STATE}),
    ("GatedLinearAttention", lambda: _gla(HEADS), {"multiply": 3 * STATE, "add": 2 * STATE}),
    # the state is read twice, decays, and takes what is new; and values less what was read
    ("GatedDeltaRule", _delta_rule, {"multiply": 4 * STATE, "add": 3 * STATE + 2 * 6}),
    (
        "GatedDeltaRule",
        lambda: _delta_rule(removal=(HEADS, HEADS)),
        {"multiply": 5 * STATE, "add": 4 * STATE},
    ),
    (
        "LinearScan",
        lambda: list(linear_scan(X[None], X[None], X[:1])),
        {"multiply": SIZE, "add": SIZE},
    ),
    (
        "LayerNorm",
        lambda: layer_norm(X, X[0], X[0], eps=1e-5),
        # the mean and its difference, squares with epsilon, and the shift
        {"multiply": 3 * SIZE, "add": 4 * SIZE, "other": 3 * ROWS},
    ),
    (
        "DepthwiseConvolution",
        lambda: depthwise_convolution(MAPS, WINDOWS),
        {"multiply": 9 * MAPS.size, "add": 9 * MAPS.size},
    ),
    (
        "DepthwiseConvolution",
        lambda: depthwise_convolution(MAPS, WINDOWS, MAPS[0, 0, 0]),
        {"multiply": 9 * MAPS.size, "add": 10 * MAPS.size},
    ),
]


@pytest.mark.parametrize(
    ("name", "make", "counts"), COUNTED, ids=[f"{n}-{name}" for n, (name, *_) in enumerate(COUNTED)]
)
def test_arithmetic(name: str, make: Callable[[], Any], counts: dict[str, int]) -> None:
    results = make()
    found = cost(results if isinstance(results, list) else [results])
    assert (found[0], found[1].work) == (name, work(**counts))


def test_queries_and_keys_of_a_step_are_normed() -> None:
    projected, buffers = mx.ones((1, 1, 16)), mx.ones((1, 1, 4, 4))
    positions, gains = mx.array([[0, 1, 2]]), mx.ones(4)
    mx.eval(projected, buffers, positions, gains)

    def step(**norms: mx.array) -> Any:
        results = attention_step(projected, buffers, buffers, positions, num_heads=2, **norms)
        return cost(list(results))[1].work

    # 2 heads of queries and one of keys, of 4 dims: squares, times a root and a gain
    norms = work(multiply=3 * 3 * 4, add=3 * 4, other=3 * 2)
    assert step(query_norm=gains, key_norm=gains) == step() + norms


def test_widths_are_those_of_the_numbers() -> None:
    half = X.astype(mx.float16)
    mx.eval(half)
    assert cost([half * half])[1].work == work(multiply=SIZE, bits=16)
    assert cost([half @ W.astype(mx.float16)])[1].work == work(multiply=MACS, add=MACS, bits=16)


def test_rows_alone_are_read_and_slots_alone_are_written() -> None:
    table = mx.zeros((100, DIMS))
    mx.eval(table)
    assert cost([table[mx.array([3, 4])]])[1].read == {0: 2 * DIMS * 4}
    update = mx.slice_update(table, X, mx.array([7]), (0,))
    found = cost([update])
    assert found[0] == "DynamicSliceUpdate"
    assert found[1].read == {0: 0} and found[1].written == {0: SIZE * 4}


def test_codes_are_multiplied_with_a_scale_and_a_bias_for_each_group() -> None:
    weight, scales, biases = mx.quantize(mx.ones((OUTPUTS, DIMS)), group_size=32, bits=4)
    mx.eval(weight, scales, biases)
    y = mx.quantized_matmul(X, weight, scales, biases, group_size=32, bits=4)
    name, found = cost([y])
    count = MACS + 2 * ROWS * OUTPUTS
    assert (name, found.work) == ("QuantizedMatmul", work(multiply=count, add=count))
