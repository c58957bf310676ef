"""Every operation with nothing along each of its dimensions: the empty result, or one clear error."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlx_mmfree.ops as ops
from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import BACKENDS, use_backend
from mlx_mmfree.ops.attention_step import new_slots
from mlx_mmfree.ops.backend.dispatch import operations
from mlx_mmfree.ops.ternary import packed_width


class Case(NamedTuple):
    """An operation of sizes by name.

    `sizes` holds ordinary ones, `arguments` makes floats to differentiate by, `call` takes sizes and
    floats, and `shapes` says what comes out. Of the dimensions in `refused` one has to be left.
    """

    sizes: dict[str, int]
    arguments: Callable[..., list[tuple[int, ...]]]
    call: Callable[..., object]
    shapes: Callable[..., list[tuple[int, ...]]]
    refused: tuple[str, ...] = ()


def packed(outputs: int, inputs: int) -> mx.array:
    return mx.full((outputs, packed_width(inputs)), 0xAAAAAAAA, mx.uint32)


def projections(outputs: int, inputs: int) -> list[ops.Projection]:
    return [ops.Projection(packed(outputs, inputs), mx.ones((1,))) for _ in range(2)]


def quantized(x: mx.array, outputs: int) -> mx.array:
    groups = x.shape[-1] // 32
    scale = mx.ones((outputs, groups))
    weight = mx.zeros((outputs, 4 * groups), mx.uint32)
    return ops.dense_matmul(x, weight, ops.AffineFormat(scale, scale, 32, 4))


ROWS = {"R": 2, "D": 32, "N": 5}
HEADS = {"B": 2, "H": 4, "G": 2, "L": 3, "K": 8, "N": 6, "V": 4}
STEP = {"B": 2, "H": 4, "G": 2, "K": 8, "C": 6, "N": 4}
CASES = {
    "activate": Case(
        {"R": 2, "D": 7},
        lambda R, D: [(R, D)],
        lambda sizes, x: ops.activate(x, "gelu"),
        lambda R, D: [(R, D)],
    ),
    "depthwise_convolution": Case(
        {"B": 2, "H": 3, "W": 5, "D": 7},
        lambda B, H, W, D: [(B, H, W, D), (D, 3, 3, 1), (D,)],
        lambda sizes, *given: ops.depthwise_convolution(*given, stride=2),
        lambda B, H, W, D: [(B, (H + 1) // 2, (W + 1) // 2, D)],
    ),
    "layer_norm": Case(
        {"R": 2, "D": 7},
        lambda R, D: [(R, D), (D,), (D,)],
        lambda sizes, *given: ops.layer_norm(*given, eps=1e-6),
        lambda R, D: [(R, D)],
        refused=("D",),
    ),
    "dense_matmul": Case(
        ROWS,
        lambda R, D, N: [(R, D), (N, D)],
        lambda sizes, x, weight: ops.dense_matmul(x, weight),
        lambda R, D, N: [(R, N)],
    ),
    "cross_entropy": Case(
        {"R": 2, "V": 7},
        lambda R, V: [(R, V)],
        lambda sizes, x: ops.cross_entropy(x, mx.zeros((sizes["R"],), mx.int32)),
        lambda R, V: [(R,)],
        refused=("V",),
    ),
    "gated_activation": Case(
        {"R": 2, "D": 32},
        lambda R, D: [(R, D), (R, D)],
        lambda sizes, gate, up: ops.gated_activation(gate, up, "silu"),
        lambda R, D: [(R, D)],
    ),
    "rms_norm": Case(
        {"R": 2, "D": 32},
        lambda R, D: [(R, D), (D,)],
        lambda sizes, x, weight: ops.rms_norm(x, weight, eps=1e-6),
        lambda R, D: [(R, D)],
        refused=("D",),
    ),
    "dense_matmul, quantised": Case(
        ROWS,
        lambda R, D, N: [(R, D)],
        lambda sizes, x: quantized(x, sizes["N"]),
        lambda R, D, N: [(R, N)],
    ),
    "linear_scan": Case(
        {"B": 2, "L": 3, "D": 4},
        lambda B, L, D: [(B, L, D), (B, L, D), (B, D)],
        lambda sizes, f, i, state: ops.linear_scan(f, i, state),
        lambda B, L, D: [(B, L, D), (B, D)],
    ),
    "ternary_linear": Case(
        ROWS,
        lambda R, D, N: [(R, D), (N, D), (D,)],
        lambda sizes, x, weight, norm: ops.ternary_linear(x, weight, norm, eps=1e-6),
        lambda R, D, N: [(R, N)],
        ("D",),
    ),
    "ternary_matmul": Case(
        ROWS,
        lambda R, D, N: [(R, D)],
        lambda sizes, x: ops.ternary_matmul(x, packed(sizes["N"], sizes["D"])),
        lambda R, D, N: [(R, N)],
    ),
    "gather_ternary_matmul": Case(
        ROWS,
        lambda R, D, N: [(R, D)],
        lambda sizes, x: ops.gather_ternary_matmul(
            x, packed(sizes["N"], sizes["D"])[None], mx.zeros(x.shape[:-1], mx.uint32)
        ),
        lambda R, D, N: [(R, N)],
    ),
    "ternary_matmul, codes": Case(
        ROWS,
        lambda R, D, N: [(R, D)],
        lambda sizes, x: ops.ternary_matmul(x, packed(sizes["N"], sizes["D"]), codes=True),
        lambda R, D, N: [(R, N)],
    ),
    "rms_norm_quantize": Case(
        {"R": 2, "D": 32},
        lambda R, D: [(R, D), (D,)],
        lambda sizes, x, weight: ops.rms_norm_quantize(x, weight, eps=1e-6),
        lambda R, D: [(R, D), (R, 1)],
        ("D",),
    ),
    "bit_linear": Case(
        ROWS,
        lambda R, D, N: [(R, D), (D,), (R, 2 * N)],
        lambda sizes, x, norm, residual: ops.bit_linear(
            x, projections(sizes["N"], sizes["D"]), norm=norm, norm_eps=1e-6, residual=residual
        ),
        lambda R, D, N: [(R, 2 * N)],
        ("D",),
    ),
    "bit_linear, floats": Case(
        {**ROWS, "R": 20},
        lambda R, D, N: [(R, 2 * D)],
        lambda sizes, x: ops.bit_linear(
            x, projections(sizes["N"], sizes["D"]), quantize=False, gate="silu"
        ),
        lambda R, D, N: [(R, 2 * N)],
        ("D",),
    ),
    "gated_delta_rule": Case(
        {"B": 2, "H": 3, "L": 3, "K": 4, "V": 5},
        lambda B, H, L, K, V: [
            *[(B, H, L, K)] * 2,
            (B, H, L, V),
            (B, H, L, 1),
            (B, H, L, K),
            (B, H, K, V),
        ],
        lambda sizes, *arrays: ops.gated_delta_rule(*arrays),
        lambda B, H, L, K, V: [(B, H, L, V), (B, H, K, V)],
    ),
    "gated_linear_attention": Case(
        {"B": 2, "H": 3, "L": 3, "K": 4, "V": 5},
        lambda B, H, L, K, V: [*[(B, H, L, K)] * 2, (B, H, L, V), (B, H, L, K), (B, H, K, V)],
        lambda sizes, *arrays: ops.gated_linear_attention(*arrays),
        lambda B, H, L, K, V: [(B, H, L, V), (B, H, K, V)],
    ),
    "gated_rms_norm": Case(
        {"R": 2, "D": 32},
        lambda R, D: [(R, D), (R, D), (D,)],
        lambda sizes, gate, h, weight: ops.gated_rms_norm(gate, h, weight, eps=1e-6),
        lambda R, D: [(R, D)],
        ("D",),
    ),
    "mlgru_step": Case(
        {"B": 2, "L": 3, "E": 8},
        lambda B, L, E: [(B, L, 3 * E), (B, E), (E,)],
        lambda sizes, gates, state, weight: ops.mlgru_step(gates, state, weight, eps=1e-6),
        lambda B, L, E: [(B, L, E), (B, E)],
        ("E",),
    ),
    "attention": Case(
        HEADS,
        lambda B, H, G, L, K, N, V: [(B, H, L, K), (B, G, N, K), (B, G, N, V)],
        lambda sizes, queries, keys, values: ops.attention(queries, keys, values),
        lambda B, H, G, L, K, N, V: [(B, H, L, V)],
        ("H", "G", "K", "N", "V"),
    ),
    "rotated_heads": Case(
        {"B": 2, "L": 3, "H": 4, "G": 2, "P": 5},
        lambda B, L, H, G, P: [(B, L, (H + 2 * G) * 2 * P)],
        lambda sizes, projected: ops.rotated_heads(
            projected,
            ops.Rotation.of(0, sizes["L"], mx.ones(sizes["P"])),
            num_heads=sizes["H"],
            num_kv_heads=sizes["G"],
        ),
        lambda B, L, H, G, P: [(B, H, L, 2 * P), (B, G, L, 2 * P), (B, G, L, 2 * P)],
        ("H", "G", "P"),
    ),
    "attention_step": Case(
        STEP,
        lambda B, H, G, K, C, N: [(B, 1, (H + 2 * G) * K), (B, G, C, K), (B, G, C, K)],
        lambda sizes, projected, keys, values: ops.attention_step(
            projected,
            keys,
            values,
            mx.broadcast_to(mx.arange(sizes["N"]), (sizes["B"], sizes["N"])),
            num_heads=sizes["H"],
        )[:3],
        lambda B, H, G, K, C, N: [(B, 1, H * K), (B, G, C, K), (B, G, C, K)],
        ("H", "G", "K", "C"),
    ),
}


def _cases() -> list:
    return [
        pytest.param(
            name,
            dimension,
            backend,
            marks=pytest.mark.metal if backend in ("metal", "cuda") else (),
        )
        for name, case in CASES.items()
        for dimension in case.sizes
        for backend in operations()[name.split(",")[0]].backends
    ]


@pytest.mark.sample(1, of="name")
@pytest.mark.parametrize(("name", "dimension", "backend"), _cases())
def test_empty(name: str, dimension: str, backend: str, request: pytest.FixtureRequest) -> None:
    if backend in ("metal", "cuda", "chunked"):
        request.getfixturevalue(backend)
    case = CASES[name]
    sizes = {**case.sizes, dimension: 0}
    floats = [mx.full(shape, 0.5) for shape in case.arguments(**sizes)]

    def results(*floats: mx.array) -> list[mx.array]:
        return [array for _, array in tree_flatten(case.call(sizes, *floats))]

    def total(*floats: mx.array) -> mx.array:
        return sum((array.sum() for array in results(*floats)), mx.array(0.0))

    with use_backend(backend):
        if dimension in case.refused:
            with pytest.raises(ValueError, match=rf"^\[{name.split(',')[0]}\] '\w+"):
                results(*floats)
            return
        try:
            got = results(*floats)
        except BackendError as error:
            pytest.skip(str(error))
        _, gradients = mx.vjp(total, floats, [mx.array(1.0)])
    mx.eval(got, gradients)
    assert [array.shape for array in got] == case.shapes(**sizes)
    assert [gradient.shape for gradient in gradients] == [array.shape for array in floats]
    assert all(mx.isfinite(array).all().item() for array in [*got, *gradients])
    if dimension == "D":
        assert all(not array.any().item() for array in got)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_states_outlast_empty_sequences(backend: str) -> None:
    state = mx.arange(8.0).reshape(2, 4)
    with use_backend(backend):
        try:
            _, scanned = ops.linear_scan(mx.zeros((2, 0, 4)), mx.zeros((2, 0, 4)), state)
            _, stepped = ops.mlgru_step(mx.zeros((2, 0, 12)), state, mx.ones((4,)), eps=1e-6)
            none, matrix = mx.zeros((1, 1, 0, 2)), state[None, None]
            values = mx.zeros((1, 1, 0, 4))
            _, replaced = ops.gated_delta_rule(none, none, values, None, None, matrix)
            _, summed = ops.gated_linear_attention(none, none, values, None, matrix)
        except BackendError as error:
            pytest.skip(str(error))
        assert mx.array_equal(scanned, state) and mx.array_equal(stepped, state)
        assert mx.array_equal(summed, matrix) and mx.array_equal(replaced, matrix)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_codes_that_do_not_fit_are_refused(backend: str) -> None:
    # views of one number: nothing is computed or allocated
    inputs = 2**22 + 32
    x = mx.broadcast_to(mx.array([127.0]), (1, inputs))
    weight = mx.broadcast_to(mx.array([[0]], mx.uint32), (1, packed_width(inputs)))
    with use_backend(backend):
        with pytest.raises(ValueError, match="'x' must have 4194304 codes a row at most"):
            ops.ternary_matmul(x, weight, codes=True)
        with pytest.raises(ValueError, match="'x' must have 4194304 inputs a row at most"):
            ops.bit_linear(x, [ops.Projection(weight, mx.ones((1,)))])
    # as many as fit
    with use_backend("reference"):
        ops.bit_linear(x[:, 32:], [ops.Projection(weight[:, 2:], mx.ones((1,)))])


@pytest.mark.parametrize(("window", "sinks"), [(2**31 - 1, 1), (2**40, 0), (0, 0), (4, -1)])
def test_windows_that_do_not_fit_are_refused(window: int, sinks: int) -> None:
    keys = mx.ones((1, 1, 4, 2))
    with pytest.raises(ValueError, match="'window' must be positive, 'sinks' not negative"):
        ops.attention_step(
            mx.ones((1, 1, 6)),
            keys,
            keys,
            mx.zeros((1, 1), mx.int32),
            num_heads=1,
            window=window,
            sinks=sinks,
        )


def test_no_first_token_stays_unless_it_is_asked_for() -> None:
    assert new_slots(3, 1, window=3).tolist() == [0]
    keys, positions = mx.ones((1, 1, 4, 2)), mx.array([[0, 1, 2]])
    results = ops.attention_step(mx.ones((1, 1, 6)), keys, keys, positions, num_heads=1, window=3)
    assert results[3].tolist() == [[3, 1, 2]]
