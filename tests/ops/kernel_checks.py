"""Comparisons of an operation on one backend with its definition; each raises if it differs."""

import mlx.core as mx
import numpy as np

from mlx_mmfree.ops import (
    Projection,
    bit_linear,
    depthwise_convolution,
    gated,
    gated_rms_norm,
    linear_scan,
    mlgru_step,
    pack_ternary,
    rms_norm_quantize,
    ternary_matmul,
    use_backend,
)
from mlx_mmfree.ops.activations import Activation
from mlx_mmfree.ops.rms_norm_quantize import Rounding
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error


def assert_close(got: mx.array, want: mx.array, tolerance: float) -> None:
    # written so that NaN fails too
    if not relative_error(got, want) <= tolerance:
        raise AssertionError(f"relative error {relative_error(got, want)}, not {tolerance}")


def assert_same(got: mx.array, want: mx.array) -> None:
    if got.shape != want.shape or not mx.array_equal(got, want):
        raise AssertionError(f"{int((got != want).sum())} of {want.size} values differ")


def random_trits(outputs: int, dims: int) -> mx.array:
    return mx.random.randint(-1, 2, (outputs, dims))


def check_code_sums(
    rows: int, dims: int, outputs: int, dtype: mx.Dtype, backend: str = "metal"
) -> None:
    """Whole numbers give the same bits whether or not they are declared as codes."""
    mx.random.seed(rows * 10007 + dims)
    codes = mx.random.randint(-128, 128, (rows, dims))
    trits = random_trits(outputs, dims)
    want = (codes[:, None].astype(mx.int32) * trits[None]).sum(axis=-1).astype(mx.float32)
    for are_codes in (False, True):
        with use_backend(backend):
            got = ternary_matmul(codes.astype(dtype), pack_ternary(trits), codes=are_codes)
        assert_same(got, want)


def check_float_sums(rows: int, dims: int, outputs: int, dtype: mx.Dtype) -> None:
    mx.random.seed(rows * 10007 + dims)
    x = mx.random.normal((rows, dims)).astype(dtype)
    weight = pack_ternary(random_trits(outputs, dims))
    with use_backend("metal"):
        got = ternary_matmul(x, weight)
    with use_backend("reference"):
        want = ternary_matmul(x, weight)
    assert_close(got, want, TOLERANCE[mx.float32])


def check_extreme_input(rows: int, value: float) -> None:
    """An input that is infinite, NaN or near the ends of float32 has the results of its trits."""
    mx.random.seed(0)
    weight, is_it = pack_ternary(random_trits(33, 1100)), mx.arange(rows * 1100) == 700
    is_it = is_it.reshape(rows, 1100)
    for others in (mx.random.normal(is_it.shape), mx.zeros(is_it.shape)):
        x = mx.where(is_it, value, others)
        with use_backend("metal"):
            got = ternary_matmul(x, weight)
        with use_backend("reference"):
            want = ternary_matmul(x, weight)
        finite = mx.isfinite(want)
        assert_same(mx.isnan(got), mx.isnan(want))
        assert_same(mx.where(mx.isinf(want), got, 0), mx.where(mx.isinf(want), want, 0))
        largest = mx.abs(mx.where(finite, want, 0)).max()
        error = mx.abs(mx.where(finite, got - want, 0)).max()
        if not (error <= 1e-6 * largest).item():
            raise AssertionError(f"off by {error.item()} of {largest.item()}")


def check_codes(
    x: mx.array, weight: mx.array | None, eps: float | None, rounding: Rounding
) -> None:
    """Asserts that codes are equal, unless the scaled value is within 1e-4 of a boundary."""
    with use_backend("metal"):
        codes, scale = rms_norm_quantize(x, weight, eps=eps, rounding=rounding)
    with use_backend("reference"):
        want_codes, want_scale = rms_norm_quantize(x, weight, eps=eps, rounding=rounding)
    assert_close(scale, want_scale, TOLERANCE[mx.float32])
    y = x.astype(mx.float32)
    if eps is not None:
        y = mx.fast.rms_norm(y, None if weight is None else weight.astype(mx.float32), eps)
    scaled = y * want_scale
    assert_same_codes(codes, want_codes, scaled)


def assert_same_codes(got: mx.array, want: mx.array, scaled: mx.array) -> None:
    """Codes are equal, but may be off by one within 1e-4 of a rounding boundary."""
    clear = mx.abs(mx.abs(scaled - mx.floor(scaled)) - 0.5) > 1e-4
    assert_same(mx.where(clear, got, 0), mx.where(clear, want, 0))
    assert_close(got, want, 1.01 / 127)


def check_ties(rounding: Rounding) -> None:
    """The largest value is 127, so the scale is exactly 1 and the ties survive."""
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    x = mx.array([[127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 126.5, below, -below]])
    with use_backend("metal"):
        codes, scale = rms_norm_quantize(x, rounding=rounding)
    ties = {"half_even": [0, 0, 2, -2, 2, 126], "half_away": [1, -1, 2, -2, 3, 127]}[rounding]
    assert_same(codes, mx.array([[127.0, *ties, 0, 0]]))
    assert_same(scale, mx.array([[1.0]]))


def scan_inputs(batch: int, length: int, dims: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    mx.random.seed(batch * 10007 + length * 101 + dims)
    f = mx.sigmoid(mx.random.normal((batch, length, dims)) + 2).astype(dtype)
    i = mx.random.normal((batch, length, dims)).astype(dtype)
    return f, i, mx.random.normal((batch, dims))


def check_scan(*inputs: mx.array, backend: str = "metal") -> None:
    with use_backend(backend):
        got = linear_scan(*inputs)
    with use_backend("reference"):
        want = linear_scan(*inputs)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, TOLERANCE[mx.float32])


def check_scan_gradient(*inputs: mx.array, backend: str = "metal") -> None:
    weights = mx.random.normal(inputs[0].shape), mx.random.normal(inputs[2].shape)

    def loss(*arrays: mx.array) -> mx.array:
        return sum((r * w).sum() for r, w in zip(linear_scan(*arrays), weights, strict=True))

    gradient = mx.grad(loss, argnums=(0, 1, 2))
    with use_backend(backend):
        got = gradient(*inputs)
    with use_backend("reference"):
        want = gradient(*inputs)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, max(GRADIENT_TOLERANCE, TOLERANCE[w.dtype]))


def check_fused_sums(
    rows: int, dims: int, outputs: tuple[int, ...], dtype: mx.Dtype, backend: str = "metal"
) -> None:
    """Rows of codes whose scale is exactly 1 give exact sums, scaled and added to exactly."""
    mx.random.seed(rows * 10007 + dims)
    codes = mx.random.randint(-127, 128, (rows, dims))
    codes[:, dims // 2] = 127
    trits = [random_trits(count, dims) for count in outputs]
    # one scale for a matrix, or one for each of its outputs, by turns
    scales = [
        (n + 1 + mx.arange(count if n % 2 else 1) % 3) / 64.0 for n, count in enumerate(outputs)
    ]
    residual = mx.random.randint(-50, 50, (rows, sum(outputs))).astype(dtype)
    want = mx.concatenate(
        [
            (codes[:, None] * t[None]).sum(axis=-1).astype(mx.float32) * scale
            for t, scale in zip(trits, scales, strict=True)
        ],
        axis=-1,
    )
    projections = [
        Projection(pack_ternary(t), scale) for t, scale in zip(trits, scales, strict=True)
    ]
    with use_backend(backend):
        got = bit_linear(codes.astype(dtype), projections, residual=residual)
    assert_same(got, (want + residual).astype(dtype))


def check_fused_codes(
    rows: int,
    dims: int,
    dtype: mx.Dtype,
    *,
    gate: Activation | None = None,
    norm_eps: float | None = None,
    eps: float | None = None,
    rounding: Rounding = "half_even",
    backend: str = "metal",
) -> None:
    """Matrices with one trit in a row show the codes, each multiplied by the sign of the trit."""
    mx.random.seed(rows * 10007 + dims)
    x = mx.random.normal((rows, dims * (2 if gate else 1))).astype(dtype)
    norm, *own_norms = 1 + 0.1 * mx.random.normal((3, dims))
    columns = [mx.random.randint(0, dims, (24,)), mx.arange(dims)[-9:]]
    signs = [mx.array([1, -1] * 12), mx.array(([-1, 1] * 5)[: len(columns[1])])]
    z = x.astype(mx.float32) if gate is None else gated(x.astype(mx.float32), gate)
    if norm_eps is not None:
        z = mx.fast.rms_norm(z, norm, norm_eps)
    projections, expected = [], []
    for column, sign, own in zip(columns, signs, own_norms, strict=True):
        trits = (mx.arange(dims) == column[:, None]) * sign[:, None]
        own = None if eps is None else own
        projections.append(Projection(pack_ternary(trits), mx.array([3.0]), own))
        with use_backend("reference"):
            codes, scale = rms_norm_quantize(z, own, eps=eps, rounding=rounding)
        y = z if eps is None else mx.fast.rms_norm(z, own, eps)
        expected.append((codes[:, column], (y * scale)[:, column], scale, sign))
    with use_backend(backend):
        got = bit_linear(
            x,
            projections,
            eps=eps,
            rounding=rounding,
            gate=gate,
            norm=None if norm_eps is None else norm,
            norm_eps=norm_eps,
        )
    start = 0
    for codes, scaled, scale, sign in expected:
        part = got[:, start : start + len(sign)].astype(mx.float32)
        start += len(sign)
        found = part * scale * sign / 3.0
        if dtype == mx.float32:
            assert_close(found, mx.round(found), 1e-5)
            assert_same_codes(mx.round(found), codes, scaled)
        else:
            assert_close(found, codes, 1.01 / 127 + TOLERANCE[dtype])


# the gate, the epsilons of both norms and the rounding; every pair of values occurs, gates apart
CODE_OPTIONS = [
    (None, None, None, "half_even"),
    (None, 1e-2, 1e-2, "half_away"),
    ("silu", None, 1e-2, "half_even"),
    ("silu", 1e-2, None, "half_away"),
    ("relu2", None, 1e-2, "half_away"),
    ("relu2", 1e-2, None, "half_even"),
    ("relu", 1e-2, 1e-2, "half_even"),
    ("relu", None, None, "half_away"),
    ("gelu", 1e-2, 1e-2, "half_even"),
]


def check_bad_row(
    quantize: bool,
    gate: Activation | None,
    eps: float | None,
    backend: str = "metal",
    rows: int = 6,
) -> None:
    """A row with NaN or infinity spoils its own results alone, and a row of zeros gives zeros."""
    x = mx.ones((rows, 100 if gate is None else 200))
    x[1, 40], x[3, 99] = mx.nan, mx.inf
    x[4] = 0
    norm = None if eps is None else mx.ones((100,))
    projection = Projection(pack_ternary(random_trits(33, 100)), mx.ones((1,)), norm)
    with use_backend(backend):
        got = bit_linear(
            x, [projection], eps=eps, quantize=quantize, gate=gate, norm=norm, norm_eps=eps
        )
    finite = mx.isfinite(got).all(axis=1).tolist()
    assert [n for n, ok in enumerate(finite) if not ok] == [1, 3]
    assert not got[4].any()
    if backend == "metal":
        assert not mx.isfinite(got[mx.array([1, 3])]).any()


def check_fused_ties(rounding: Rounding, backend: str = "metal", rows: int = 1) -> None:
    """The largest value is 127, so the scale is exactly 1 and the ties survive."""
    x = mx.array([[127.0, 0.5, 2.5, -0.5, -2.5]] * rows)
    weight = pack_ternary(mx.eye(5).astype(mx.int32))
    with use_backend(backend):
        got = bit_linear(x, [Projection(weight, mx.ones((1,)))], rounding=rounding)
    ties = {"half_even": [0, 2, 0, -2], "half_away": [1, 3, -1, -3]}[rounding]
    assert_same(got, mx.array([[127.0, *ties]] * rows))


def check_fused_floats(
    rows: int, dims: int, dtype: mx.Dtype, gate: Activation | None, backend: str = "metal"
) -> None:
    mx.random.seed(rows * 10007 + dims)
    x = mx.random.normal((rows, dims * (2 if gate else 1))).astype(dtype)
    projections = [
        Projection(
            pack_ternary(random_trits(count, dims)),
            mx.array([0.02]),
            1 + 0.1 * mx.random.normal((dims,)),
        )
        for count in (33, 7)
    ]
    options = {"eps": 1e-3, "quantize": False, "gate": gate, "norm_eps": 1e-2}
    options["norm"] = 1 + 0.1 * mx.random.normal((dims,))
    with use_backend(backend):
        got = bit_linear(x, projections, **options)
    with use_backend("reference"):
        want = bit_linear(x, projections, **options)
    assert_close(got, want, TOLERANCE[dtype])


def check_gated_norm(gate: mx.array, h: mx.array, weight: mx.array) -> None:
    with use_backend("metal"):
        got = gated_rms_norm(gate, h, weight, eps=1e-3)
    with use_backend("reference"):
        want = gated_rms_norm(gate, h, weight, eps=1e-3)
    assert_close(got, want, TOLERANCE[gate.dtype])


def check_step(
    batch: int,
    dims: int,
    dtype: mx.Dtype,
    *,
    is_bounded: bool = True,
    is_masked: bool = True,
    has_starts: bool = False,
    length: int = 1,
    backend: str = "metal",
) -> None:
    mx.random.seed(batch * 10007 + dims)
    gates = mx.random.normal((batch, length, 3 * dims)).astype(dtype)
    state, weight = mx.random.normal((batch, dims)), 1 + 0.1 * mx.random.normal((dims,))
    options = {
        "eps": 1e-3,
        "lower_bound": mx.random.uniform(shape=(dims,)) if is_bounded else None,
        "valid": None,
    }
    # a row without valid positions, and gaps in the others
    rows, positions = mx.arange(batch)[:, None], mx.arange(length)
    if is_masked:
        options["valid"] = (rows % 3 != 1) & (positions % 5 != 4)
    if has_starts:
        options["starts"] = (positions + rows) % 7 == 3
    with use_backend(backend):
        got = mlgru_step(gates, state, weight, **options)
    with use_backend("reference"):
        want = mlgru_step(gates, state, weight, **options)
    assert_close(got[0], want[0], TOLERANCE[dtype])
    assert_close(got[1], want[1], TOLERANCE[mx.float32])
    if is_masked:
        assert_same(got[1][1::3], state[1::3])


def check_depthwise(
    map_: tuple[int, int, int], side: int, stride: int, dtype: mx.Dtype = mx.float32
) -> None:
    mx.random.seed(sum(map_) + side)
    shapes = (2, *map_), (map_[2], side, side, 1), map_[2:]
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    with use_backend("metal"):
        got = depthwise_convolution(*arrays, stride=stride)
    with use_backend("reference"):
        want = depthwise_convolution(*(a.astype(mx.float32) for a in arrays), stride=stride)
    if got.dtype != dtype:
        raise AssertionError(f"a result of {got.dtype}")
    assert_close(got, want, TOLERANCE[dtype])
