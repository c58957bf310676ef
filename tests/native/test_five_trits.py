"""Products of five trits a byte against whole numbers, and the bits of the same products with 2 bits."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import (
    Projection,
    bit_linear,
    pack_ternary,
    packed_columns,
    ternary_matmul,
    unpack_ternary,
    use_backend,
)

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

SIZES = [(3, 1), (1, 4), (5, 5), (17, 31), (40, 319), (40, 320), (33, 321), (9, 645), (70, 2560)]
REAL = [(64, 11008), (32000, 64), (24, 65536)]


def fives(trits: np.ndarray) -> mx.array:
    """The layout of `ops.five_trits`, by its formula."""
    padded = np.pad(trits + 1, ((0, 0), (0, -trits.shape[1] % 5)), constant_values=1)
    numbers = padded.reshape(len(trits), -1, 5) @ 3 ** np.arange(5)
    return mx.array(np.ceil(256 * numbers / 243).astype(np.uint8))


def problem(rows: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers that are their own codes, since the largest of each row is 127, and trits."""
    random = np.random.default_rng((rows, inputs, outputs))
    codes = random.integers(-127, 128, (rows, inputs))
    codes[:, inputs // 2] = 127 * random.choice([-1, 1], rows)
    return codes, random.integers(-1, 2, (outputs, inputs))


def multiply(codes: np.ndarray, trits: np.ndarray) -> np.ndarray:
    with use_backend("native"):
        projection = Projection(fives(trits), mx.ones((1,)))
        return np.array(bit_linear(mx.array(codes, mx.float32), (projection,)))


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_sums_are_exact(outputs: int, inputs: int, instructions: str, threads: int) -> None:
    for rows in (1, 2, 3, 4, 5, 30):
        codes, trits = problem(rows, inputs, outputs)
        assert np.array_equal(multiply(codes, trits), codes @ trits.T), rows


@pytest.mark.parametrize(("outputs", "inputs"), REAL)
def test_sums_of_real_sizes(outputs: int, inputs: int, instructions: str) -> None:
    for rows in (1, 3):
        codes, trits = problem(rows, inputs, outputs)
        assert np.array_equal(multiply(codes, trits), codes @ trits.T), rows


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("trit", [-1, 1])
def test_extreme_sums_do_not_wrap(sign: int, trit: int, instructions: str) -> None:
    codes, trits = np.full((2, 65536), 127 * sign), np.full((5, 65536), trit)
    assert np.array_equal(multiply(codes, trits), codes @ trits.T)


def test_every_byte_stands_for_its_trits(instructions: str) -> None:
    """All 243 bytes at each place of a vector."""
    numbers = np.arange(243)[:, None] // 3 ** np.arange(5) % 3 - 1
    trits = np.stack([np.roll(numbers, place, axis=0).reshape(-1) for place in range(0, 243, 7)])
    for rows in (1, 3):
        codes, _ = problem(rows, trits.shape[1], 1)
        assert np.array_equal(multiply(codes, trits), codes @ trits.T)
    assert np.array_equal(np.array(unpack_ternary(fives(trits), trits.shape[1])), trits)


def call(rows: int, dims: int, options: dict[str, Any], has_fives: bool) -> mx.array:
    """A call with everything around the products, of two matrices."""
    random = np.random.default_rng((rows, dims))

    def floats(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape), mx.float32)

    width = 2 * dims if "gate" in options else dims
    x, residual = floats(rows, width), floats(rows, 58)
    projections = []
    for outputs in (37, 21):
        trits = random.integers(-1, 2, (outputs, dims))
        packed = fives(trits) if has_fives else pack_ternary(mx.array(trits))
        norm = 1 + floats(dims) / 8 if "eps" in options else None
        projections.append(Projection(packed, abs(floats(1 if outputs == 37 else outputs)), norm))
    before = 1 + floats(dims) / 8 if "norm_eps" in options else None
    return bit_linear(x, projections, norm=before, residual=residual, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 1e-6, "rounding": "half_away"}, {"gate": "silu", "norm_eps": 1e-5}],
    ids=["plain", "norms", "gate"],
)
def test_the_same_bits_as_with_2_bits(
    options: dict[str, Any], instructions: str, threads: int
) -> None:
    for rows, dims in ((1, 333), (2, 1000), (3, 333), (29, 64)):
        assert mx.array_equal(*(call(rows, dims, options, each) for each in (True, False)))


@pytest.mark.parametrize("quantize", [True, False])
def test_gradients_are_those_of_2_bits(quantize: bool) -> None:
    codes, trits = problem(3, 333, 40)
    x = mx.array(codes, mx.float32) / 127
    found = []
    for weight in (fives(trits), pack_ternary(mx.array(trits))):
        projection = Projection(weight, mx.array([0.5]))

        def loss(x: mx.array, projection: Projection = projection) -> mx.array:
            return (bit_linear(x, (projection,), quantize=quantize) ** 2).sum()

        found.append(mx.value_and_grad(loss)(x))
    (own, gradient), (other, wanted) = found
    assert mx.allclose(own, other, rtol=1e-5)
    assert mx.allclose(gradient, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max().item())
    y = codes / 127 @ trits.T * 0.5
    exact = 2 * 0.5 * y @ trits
    assert np.abs(np.array(gradient) - exact).max() <= 1e-3 * np.abs(exact).max()


def test_operations_that_need_words() -> None:
    codes, trits = problem(2, 333, 40)
    weight = fives(trits)
    for are_codes in (True, False):
        sums = ternary_matmul(mx.array(codes, mx.float32), weight, codes=are_codes)
        assert np.array_equal(np.array(sums), codes @ trits.T)
    assert mx.array_equal(
        packed_columns(weight, 333, 7, 207), pack_ternary(mx.array(trits[:, 7:207]))
    )
    with use_backend("chunked"), pytest.raises(BackendError, match="five trits a byte"):
        ternary_matmul(mx.ones((1, 333)), weight)


class TestRefused:
    def test_both_forms_in_one_call(self) -> None:
        _, trits = problem(1, 40, 3)
        both = [Projection(w, mx.ones((1,))) for w in (fives(trits), pack_ternary(mx.array(trits)))]
        for projections in (both, both[::-1]):
            with pytest.raises(ValueError, match="'projections' must have weights of"):
                bit_linear(mx.ones((1, 40)), projections)

    @pytest.mark.parametrize("inputs", [39, 46])
    def test_another_width(self, inputs: int) -> None:
        _, trits = problem(1, 45, 3)
        projection = Projection(fives(trits), mx.ones((1,)))
        with pytest.raises(ValueError, match=r"bytes a row, mlx.core.uint8, for"):
            bit_linear(mx.ones((1, inputs)), (projection,))
        with pytest.raises(ValueError, match="bytes a row for"):
            ternary_matmul(mx.ones((1, inputs)), projection.weight)

    def test_too_many_inputs(self) -> None:
        projection = Projection(mx.zeros((1, 13108), mx.uint8), mx.ones((1,)))
        with pytest.raises(ValueError, match="'x' must have 65536 inputs a row at most for five"):
            bit_linear(mx.ones((1, 65537)), (projection,))
