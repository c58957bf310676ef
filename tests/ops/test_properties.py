"""Properties of every backend that runs here, whatever the shape, dtype, strides and values."""

import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from mlx_mmfree import native, ops
from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import Projection, pack_ternary, use_backend
from mlx_mmfree.ops.backend import choice
from mlx_mmfree.ops.backend.dispatch import operations
from mlx_mmfree.ops.backend.gradient import assume_gradients
from tests.ops.attention_formula import Sizes, arguments, check, mask_of
from tests.ops.conftest import STRICT
from tests.ops.kernel_checks import assert_close
from tests.tolerances import TOLERANCE

DTYPES = st.sampled_from([mx.float32, mx.float16, mx.bfloat16])
SEEDS = st.integers(0, 2**32 - 1)
# rows, key heads, queries, and keys beside as many
SIZES_OF_ATTENTION = [(1, 2), (1, 2), (1, 70), (1, 40)]
LAYOUTS = st.sampled_from(["contiguous", "transposed", "reversed", "every second"])


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """A backend of the operation, ready to run."""
    name = request.param
    if name in ("metal", "cuda", "chunked"):
        request.getfixturevalue(name)
    if name == "native" and (reason := native.unavailable()):
        pytest.skip(reason)
    return name


def on_every_backend(*names: str) -> pytest.MarkDecorator:
    found = [
        pytest.param(op, name, marks=pytest.mark.metal if name in ("metal", "cuda") else ())
        for op in names
        for name in operations()[op].backends
        # the others are plain operations there, some on parts that cannot be forced
        if name != "cuda" or op == "linear_scan"
    ]
    return pytest.mark.parametrize(("op", "backend"), found, indirect=["backend"])


def hold(
    backend: str, claim: Callable[..., None], *, rows: list[int] | None = None, **values: Any
) -> None:
    """Tries a claim on many values that the backend takes.

    The strict emulator also tries every way to compute a product.

    They are few where each variant of a kernel must be compiled, and always the same ones, but for the
    strict emulator: it is run by itself, each time with other values.
    """

    taken = 0

    def attempt(product: str, **values: Any) -> None:
        nonlocal taken
        try:
            with choice.use(product):
                claim(**values)
        except BackendError:
            reject()
        taken += 1

    is_strict = STRICT in os.environ
    are_few = backend in ("metal", "cuda") and not is_strict
    values["product"] = st.sampled_from(choice.NAMES if is_strict else [choice.DEFAULT])
    if rows is not None:
        # shapes of one kernel for a few rows and of one for many
        values["rows"] = st.sampled_from([0, 3, 49] if are_few else [*rows, 49])
    tried = settings(
        max_examples=6 if are_few else 30,
        derandomize=not is_strict,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )(given(**values)(attempt))
    with use_backend(backend):
        tried()
    assert taken


def laid_out(x: np.ndarray, layout: str, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The values of `x` with other strides."""
    if layout == "transposed":
        return mx.array(x.T.copy()).astype(dtype).T
    if layout == "reversed":
        return mx.array(x[..., ::-1].copy()).astype(dtype)[..., ::-1]
    if layout == "every second":
        return mx.array(np.repeat(x, 2, axis=-1)).astype(dtype)[..., ::2]
    return mx.array(x).astype(dtype)


@pytest.mark.sample(2)
@on_every_backend("ternary_matmul")
def test_sums_of_codes_are_exact(op: str, backend: str) -> None:
    def claim(
        rows: int,
        dims: int,
        outputs: int,
        dtype: mx.Dtype,
        layout: str,
        seed: int,
        is_extreme: bool,
        codes: bool,
    ) -> None:
        random = np.random.default_rng(seed)
        x = random.integers(-128, 128, (rows, dims))
        trits = random.integers(-1, 2, (outputs, dims))
        if is_extreme:
            # the sums are as far from zero as they go, in both directions
            x, trits = np.where(x[:, :1] < 0, -128, 127) + 0 * x, np.sign(trits[:, :1]) + 0 * trits
        got = ops.ternary_matmul(
            laid_out(x, layout, dtype), pack_ternary(mx.array(trits)), codes=codes
        )
        assert np.array_equal(np.array(got), x @ trits.T)

    hold(
        backend,
        claim,
        rows=[0, 1, 2, 5, 8, 9, 33],
        dims=st.integers(1, 700),
        outputs=st.integers(1, 40),
        dtype=DTYPES,
        layout=LAYOUTS,
        seed=SEEDS,
        is_extreme=st.booleans(),
        codes=st.booleans(),
    )


@on_every_backend("rms_norm_quantize")
def test_codes_are_those_of_the_formula(op: str, backend: str) -> None:
    def claim(
        rows: int, dims: int, dtype: mx.Dtype, layout: str, seed: int, size: float, rounding: Any
    ) -> None:
        x = size * np.random.default_rng(seed).standard_normal((rows, dims)).astype(np.float32)
        given_x = laid_out(x, layout, dtype)
        codes, scale = (np.array(r) for r in ops.rms_norm_quantize(given_x, rounding=rounding))
        values = np.array(given_x.astype(mx.float32), np.float64)
        want = 127 / np.maximum(np.abs(values).max(axis=-1, keepdims=True), 1e-5)
        assert np.allclose(scale, want, rtol=1e-6)
        assert (np.abs(codes) <= 127).all()
        scaled = values * want
        clear = np.abs(np.abs(scaled) % 1 - 0.5) > 1e-4
        assert np.array_equal(codes[clear], np.round(scaled)[clear])

    hold(
        backend,
        claim,
        rows=[0, 1, 5, 40],
        dims=st.integers(1, 300),
        dtype=DTYPES,
        layout=LAYOUTS,
        seed=SEEDS,
        size=st.sampled_from([0.0, 1e-7, 1.0, 1e4]),
        rounding=st.sampled_from(["half_even", "half_away"]),
    )


@pytest.mark.sample(2)
@on_every_backend("bit_linear")
def test_products_are_those_of_the_definition(op: str, backend: str) -> None:
    def claim(
        rows: int,
        dims: int,
        outputs: list[int],
        dtype: mx.Dtype,
        layout: str,
        seed: int,
        gate: Any,
        is_normed: bool,
    ) -> None:
        random = np.random.default_rng(seed)
        x = laid_out(random.standard_normal((rows, (2 if gate else 1) * dims)), layout, dtype)
        norm, residual = (random.standard_normal(s) for s in (dims, (rows, sum(outputs))))
        projections = [
            Projection(
                pack_ternary(mx.array(random.integers(-1, 2, (n, dims)))),
                laid_out(random.uniform(0.1, 1, (n if seed % 2 else 1,)), layout),
                laid_out(random.standard_normal(dims), layout) if is_normed else None,
            )
            for n in outputs
        ]
        options: dict[str, Any] = {"quantize": False, "gate": gate}
        options["residual"] = laid_out(residual, layout, dtype)
        if is_normed:
            options |= {"eps": 0.1, "norm": laid_out(norm, layout), "norm_eps": 0.2}
        got = ops.bit_linear(x, projections, **options)
        with use_backend("reference"):
            assert_close(got, ops.bit_linear(x, projections, **options), TOLERANCE[dtype])

    hold(
        backend,
        claim,
        rows=[0, 1, 5, 9],
        dims=st.integers(1, 150),
        outputs=st.lists(st.integers(1, 40), min_size=1, max_size=6),
        dtype=DTYPES,
        layout=LAYOUTS,
        seed=SEEDS,
        gate=st.sampled_from([None, "silu", "relu2", "relu", "gelu"]),
        is_normed=st.booleans(),
    )


WEIGHT = pack_ternary(mx.array(np.random.default_rng(0).integers(-1, 2, (33, 70))))
ROW_BY_ROW: dict[str, Callable[[mx.array], mx.array]] = {
    "bit_linear": lambda x: ops.bit_linear(
        x, [Projection(WEIGHT, mx.ones((1,)), mx.ones((70,)))], eps=1e-6
    ),
    "gated_rms_norm": lambda x: ops.gated_rms_norm(x, mx.ones(x.shape), mx.ones((70,)), eps=1e-6),
    "rms_norm_quantize": lambda x: ops.rms_norm_quantize(x)[0],
    "ternary_matmul": lambda x: ops.ternary_matmul(x, WEIGHT),
}


@pytest.mark.sample(4)
@on_every_backend(*ROW_BY_ROW)
def test_bad_rows_stay_alone(op: str, backend: str) -> None:
    def claim(rows: int, seed: int, bad: list[float], dtype: mx.Dtype) -> None:
        random = np.random.default_rng(seed)
        x = random.standard_normal((rows, 70)).astype(np.float32)
        bad_rows = random.permutation(rows)[: len(bad)]
        x[bad_rows] = 0
        want = ROW_BY_ROW[op](mx.array(x).astype(dtype))
        x[bad_rows, random.integers(0, 70, len(bad_rows))] = bad[: len(bad_rows)]
        got = ROW_BY_ROW[op](mx.array(x).astype(dtype))
        finite = np.array(mx.isfinite(got))
        is_bad = np.isin(np.arange(rows), bad_rows)
        assert finite[~is_bad].all()
        assert not finite[is_bad].all(axis=-1).any()
        same = np.array(got.astype(mx.float32)) == np.array(want.astype(mx.float32))
        assert same[~is_bad].all()

    hold(
        backend,
        claim,
        rows=[1, 4, 8, 40],
        seed=SEEDS,
        bad=st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=3),
        dtype=DTYPES,
    )


@on_every_backend("linear_scan")
def test_a_scan_may_be_cut(op: str, backend: str) -> None:
    def claim(batch: int, length: int, dims: int, cut: float, seed: int, gate: Any) -> None:
        random = np.random.default_rng(seed)
        shape = (batch, length, dims)
        f = random.uniform(size=shape) if gate is None else np.full(shape, gate)
        i, state = random.standard_normal(shape), random.standard_normal((batch, dims))
        arrays = [mx.array(x.astype(np.float32)) for x in (f, i, state)]
        states, last = ops.linear_scan(*arrays)
        values, want = state, []
        for step in range(length):
            values = f[:, step] * values + i[:, step]
            want.append(values)
        assert_close(
            states, mx.array(np.array(want).reshape(length, batch, dims)).swapaxes(0, 1), 1e-5
        )
        assert_close(last, mx.array(values), 1e-5)
        at = round(cut * length)
        first, middle = ops.linear_scan(arrays[0][:, :at], arrays[1][:, :at], arrays[2])
        second, end = ops.linear_scan(arrays[0][:, at:], arrays[1][:, at:], middle)
        both = mx.concatenate([first, second], axis=1)
        if backend in ("native", "reference"):
            assert mx.array_equal(both, states)
            assert mx.array_equal(end, last)
        assert_close(both, states, 1e-5)
        assert_close(end, last, 1e-5)

    hold(
        backend,
        claim,
        batch=st.integers(0, 3),
        length=st.integers(0, 200),
        dims=st.integers(1, 40),
        cut=st.floats(0, 1),
        seed=SEEDS,
        gate=st.sampled_from([None, None, 0.0, 1.0]),
    )


@pytest.mark.sample(2)
@on_every_backend("mlgru_step")
def test_steps_are_those_of_the_definition(op: str, backend: str) -> None:
    def claim(
        batch: int,
        length: int,
        dims: int,
        dtype: mx.Dtype,
        seed: int,
        is_bounded: bool,
        is_masked: bool,
        is_packed: bool,
    ) -> None:
        random = np.random.default_rng(seed)
        gates, state, weight = (
            mx.array(random.standard_normal(shape).astype(np.float32))
            for shape in ((batch, length, 3 * dims), (batch, dims), (dims,))
        )
        bound = mx.array(random.uniform(size=dims).astype(np.float32)) if is_bounded else None
        valid = mx.array(random.uniform(size=(batch, length)) < 0.5) if is_masked else None
        arguments = (gates.astype(dtype), state, weight)
        starts = mx.array(random.uniform(size=(batch, length)) < 0.5) if is_packed else None
        options = {"eps": 0.1, "lower_bound": bound, "valid": valid, "starts": starts}
        got = ops.mlgru_step(*arguments, **options)
        with use_backend("reference"):
            want = ops.mlgru_step(*arguments, **options)
        assert_close(got[0], want[0], TOLERANCE[dtype])
        assert_close(got[1], want[1], TOLERANCE[mx.float32])

    hold(
        backend,
        claim,
        batch=st.integers(0, 3),
        length=st.integers(0, 3),
        dims=st.integers(1, 100),
        dtype=DTYPES,
        seed=SEEDS,
        is_bounded=st.booleans(),
        is_masked=st.booleans(),
        # the compiled kernel leaves this to the others
        is_packed=st.just(False) if backend == "native" else st.booleans(),
    )


@pytest.mark.exhaustive
@on_every_backend("attention")
def test_attention_and_its_gradient_are_those_of_the_formula(op: str, backend: str) -> None:
    def claim(
        sizes: tuple[int, ...], dims: tuple[int, int], shared: int, mask: str | None, seed: int
    ) -> None:
        batch, groups, length, more = sizes
        variant = Sizes(length, length + more, *dims, batch, groups * shared, groups)
        arrays = arguments(variant, key=mx.random.key(seed))
        check(arrays, mask_of(mask, variant), variant, backend=backend)

    with assume_gradients(True):
        hold(
            backend,
            claim,
            sizes=st.tuples(*(st.integers(low, high) for low, high in SIZES_OF_ATTENTION)),
            dims=st.sampled_from([(64, 64), (8, 8), (33, 16), (1, 100), (128, 3)]),
            shared=st.integers(1, 3),
            mask=st.sampled_from([None, "causal", "rows", "keys"]),
            seed=SEEDS,
        )
