"""The compiled products against whole numbers, for every instruction set of this processor."""

from collections.abc import Callable
from functools import cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mmfree import native
from mlx_mmfree.ops import pack_ternary, packed_width, unpack_ternary
from mlx_mmfree.ops.ternary_matmul import native as compiled
from mlx_mmfree.ops.ternary_matmul import reference
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

INPUTS = [1, 31, 33, 63, 100, 256, 5460]
ROWS = [1, 2, 7, 8, 9, 130]


def problem(rows: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Activation codes, extremes included, and trits."""
    random = np.random.default_rng((rows, inputs, outputs))
    codes = random.integers(-128, 128, (rows, inputs))
    codes[random.random((rows, inputs)) < 0.1] = -128
    return codes, random.integers(-1, 2, (outputs, inputs))


def packed(trits: np.ndarray) -> mx.array:
    return pack_ternary(mx.array(trits))


def multiply(x: mx.array, weight: mx.array, codes: bool) -> np.ndarray:
    return np.array(compiled(x, weight, codes=codes))


@cache
def solved(rows: int, inputs: int, outputs: int) -> tuple[mx.array, mx.array, np.ndarray]:
    """A problem, and its sums in whole numbers, which NumPy needs long for."""
    q, trits = problem(rows, inputs, outputs)
    return mx.array(q, mx.float32), packed(trits), q @ trits.T


@pytest.mark.sample(2)
@pytest.mark.parametrize("inputs", INPUTS)
def test_sums_are_exact(inputs: int, instructions: str, threads: int) -> None:
    outputs = {1: 1, 31: 2, 33: 67}.get(inputs, 130)
    for rows, codes in product(ROWS, (True, False)):
        x, weight, want = solved(rows, inputs, outputs)
        assert np.array_equal(multiply(x, weight, codes), want), (rows, codes)


@pytest.mark.parametrize("sign", [-1, 1])
def test_extreme_sums_do_not_wrap(sign: int, instructions: str) -> None:
    q = np.full((3, 20000), -128)
    trits = np.full((5, 20000), sign)
    got = multiply(mx.array(q, mx.float32), packed(trits), codes=True)
    assert np.array_equal(got, q @ trits.T)


def test_words_of_the_layout_that_are_not_trits_count_as_two(instructions: str) -> None:
    q = np.arange(-32, 32)[None]
    weight = mx.full((1, packed_width(64)), 0xFFFFFFFF, dtype=mx.uint32)
    for codes in (True, False):
        assert multiply(mx.array(q, mx.float32), weight, codes).item() == 2 * q.sum()


def test_padding_codes_do_not_matter(instructions: str) -> None:
    q, trits = problem(3, 33, 5)
    weight = np.array(packed(trits))
    weight[:, 2] |= np.uint32(0xFFFFFFFC)
    weight[:, 3] = 0
    for codes in (True, False):
        got = multiply(mx.array(q, mx.float32), mx.array(weight), codes)
        assert np.array_equal(got, q @ trits.T)


@pytest.mark.parametrize("inputs", [33, 2560])
def test_float_sums_have_the_same_bits_everywhere(inputs: int, instructions: str) -> None:
    mx.random.seed(inputs)
    x = mx.random.normal((13, inputs))
    weight = packed(problem(1, inputs, 70)[1])
    module = native.kernels()
    module.use_kernels("portable")
    wanted = multiply(x, weight, codes=False)
    dense = x.astype(mx.float32) @ unpack_ternary(weight, inputs).T
    assert np.abs(wanted - np.array(dense)).max() <= 1e-5 * np.abs(wanted).max()
    module.use_kernels(instructions)
    assert np.array_equal(multiply(x, weight, codes=False), wanted)


@pytest.mark.parametrize("codes", [True, False], ids=["codes", "floats"])
def test_a_row_does_not_depend_on_the_others(codes: bool, instructions: str, threads: int) -> None:
    q, trits = problem(1030, 300, 77)
    x = mx.array(q, mx.float32) * (1.0 if codes else 0.37)
    weight = packed(trits)
    whole = multiply(x, weight, codes)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 517):
        assert np.array_equal(multiply(x[3 : 3 + rows], weight, codes), whole[3 : 3 + rows])


def test_batch_dimensions_and_strides(instructions: str) -> None:
    q, trits = problem(24, 40, 9)
    x, weight = mx.array(q, mx.float32), packed(trits)
    want = q @ trits.T
    got = multiply(x.reshape(2, 3, 4, 40), weight, codes=True)
    assert np.array_equal(got, want.reshape(2, 3, 4, 9))
    assert np.array_equal(multiply(x[5], weight, codes=True), want[5])
    assert np.array_equal(multiply(x[::-2], weight, codes=True), want[::-2])
    turned = mx.contiguous(x.T).T
    assert np.array_equal(multiply(turned, weight, codes=True), want)
    spread = mx.broadcast_to(x[:1], (5, 40))
    assert np.array_equal(multiply(spread, weight, codes=True), np.repeat(want[:1], 5, axis=0))
    assert np.array_equal(multiply(x, weight[::-3], codes=True), want[:, ::-3])


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    weight = packed(problem(1, 40, 9)[1])
    assert multiply(mx.zeros(shape), weight, codes=True).shape == (*shape[:-1], 9)


def test_no_inputs_and_no_outputs() -> None:
    nothing = mx.zeros((3, 0), mx.uint32)
    for codes in (True, False):
        assert np.array_equal(multiply(mx.zeros((2, 0)), nothing, codes), np.zeros((2, 3)))
    assert multiply(mx.zeros((2, 40)), mx.zeros((0, 4), mx.uint32), codes=True).shape == (2, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "floats"])
def test_a_bad_row_stays_alone(bad: float, codes: bool, instructions: str) -> None:
    q, trits = problem(9, 100, 20)
    trits[:, 50] = 0
    x = q.astype(np.float32)
    x[4, 50] = bad
    got = multiply(mx.array(x), packed(trits), codes)
    assert np.isnan(got[4]).all()
    rest = np.arange(9) != 4
    assert np.array_equal(got[rest], (q @ trits.T)[rest])


@pytest.mark.parametrize("bad", [0.5, 128.0, -129.0, 1e30])
def test_a_row_that_breaks_the_word_gives_nan(bad: float, instructions: str) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 63] = bad
    got = multiply(mx.array(x), packed(np.ones((3, 64), int)), codes=True)
    assert np.array_equal(got[0], [64, 64, 64])
    assert np.isnan(got[1]).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("inputs", [1, 33, 256, 700])
def test_gradient(inputs: int, instructions: str, threads: int) -> None:
    for rows, codes in product((1, 2, 5, 6, 7, 20, 250), (True, False)):
        q, trits = problem(rows, inputs, 45)
        upstream = np.random.default_rng(0).integers(-50, 50, (rows, 45))

        def loss(x: mx.array) -> mx.array:
            sums = compiled(x, packed(trits), codes=codes)  # noqa: B023
            return (sums * mx.array(upstream, mx.float32)).sum()  # noqa: B023

        got = mx.grad(loss)(mx.array(q, mx.float32))
        assert np.array_equal(np.array(got), upstream @ trits), (rows, codes)


def test_gradient_has_the_same_bits_everywhere(instructions: str) -> None:
    mx.random.seed(3)
    upstream = mx.random.normal((11, 70))
    weight = packed(problem(1, 300, 70)[1])

    def gradient(upstream: mx.array) -> np.ndarray:
        zeros = mx.zeros((upstream.shape[0], 300))
        outputs = mx.vjp(lambda x: compiled(x, weight, codes=False), [zeros], [upstream])
        return np.array(outputs[1][0])

    whole = gradient(upstream)
    assert np.array_equal(gradient(upstream[4:7]), whole[4:7])
    native.kernels().use_kernels("portable")
    assert np.array_equal(gradient(upstream), whole)


@pytest.mark.usefixtures("unfused")
def test_transforms() -> None:
    mx.random.seed(1)
    x = mx.random.normal((4, 3, 40))
    weights = mx.stack([packed(problem(k, 40, 9)[1]) for k in range(4)])

    def ours(x: mx.array, weight: mx.array) -> mx.array:
        return compiled(x, weight, codes=False)

    def plain(x: mx.array, weight: mx.array) -> mx.array:
        return reference(x, weight, codes=False)

    def check(got: mx.array, want: mx.array) -> None:
        assert relative_error(got, want) <= TOLERANCE[mx.float32]

    for axes in ((0, None), (1, None), (0, 0), (None, 0)):
        first = x if axes[0] is not None else x[0]
        second = weights if axes[1] is not None else weights[0]
        want = [
            plain(
                first if axes[0] is None else mx.take(first, k, axes[0]),
                second[k] if axes[1] == 0 else second,
            )
            for k in range(4 if axes != (1, None) else 3)
        ]
        check(mx.vmap(ours, in_axes=axes)(first, second), mx.stack(want))

    def squares(multiply: Callable[..., mx.array], x: mx.array) -> mx.array:
        return multiply(x, weights[1]).square().sum()

    want = mx.grad(lambda x: squares(plain, x))(x)
    check(mx.grad(lambda x: squares(ours, x))(x), want)
    check(mx.compile(mx.grad(lambda x: squares(ours, x)))(x), want)
    check(mx.vmap(mx.grad(lambda x: squares(ours, x)))(x), want)
    check(mx.grad(lambda x: mx.vmap(lambda x: squares(ours, x))(x).sum())(x), want)
    twice = mx.grad(lambda x: mx.grad(lambda x: squares(ours, x))(x).square().sum())(x)
    check(twice, mx.grad(lambda x: mx.grad(lambda x: squares(plain, x))(x).square().sum())(x))
    tangent = mx.random.normal(x.shape)
    got = mx.jvp(lambda x: ours(x, weights[0]), [x], [tangent])[1][0]
    check(got, plain(tangent, weights[0]))


def test_packed_trits_have_no_gradient() -> None:
    weight = packed(problem(1, 40, 9)[1])
    with pytest.raises(ValueError, match="packed trits have no gradient"):
        mx.vjp(
            lambda weight: compiled(mx.ones((1, 40)), weight, codes=True),
            [weight],
            [mx.ones((1, 9))],
        )


def test_kernel_checks_its_arguments() -> None:
    kernel = native.kernels().ternary_matmul
    with pytest.raises(ValueError, match="'x' must be float32 and 'weight' uint32"):
        kernel(mx.zeros((2, 32), mx.float16), mx.zeros((3, 2), mx.uint32), True)
    with pytest.raises(ValueError, match=r"must be \(\.\.\., D\)"):
        kernel(mx.zeros((2, 32)), mx.zeros((3, 4), mx.uint32), True)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape(data: st.DataObject) -> None:
    rows, inputs, outputs = (data.draw(st.integers(1, most)) for most in (40, 600, 80))
    seed = data.draw(st.integers(0, 2**32 - 1))
    module = native.kernels()
    before = module.kernel_name(), module.threads()
    random = np.random.default_rng(seed)
    q = random.integers(-128, 128, (rows, inputs))
    trits = random.integers(-1, 2, (outputs, inputs))
    module.use_kernels(data.draw(st.sampled_from(module.kernel_names())))
    module.set_threads(data.draw(st.integers(1, 4)))
    try:
        for codes in (True, False):
            got = multiply(mx.array(q, mx.float32), packed(trits), codes)
            assert np.array_equal(got, q @ trits.T)
    finally:
        module.use_kernels(before[0])
        module.set_threads(before[1])
