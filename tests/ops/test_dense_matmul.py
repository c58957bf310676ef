"""`dense_matmul` with codes on every backend, and the arguments it refuses."""

import importlib
import itertools
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import BackendError, UsageError
from mlx_mmfree.ops import AffineFormat, dense_matmul, use_backend
from mlx_mmfree.ops.dense_matmul import BITS, GROUP_SIZES
from tests.tolerances import TOLERANCE, relative_error

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def quantize(
    outputs: int, dims: int, group_size: int, bits: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, AffineFormat]:
    weight = mx.random.normal((outputs, dims)).astype(dtype)
    codes, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    return codes, AffineFormat(scales, biases, group_size, bits)


def exact(x: mx.array, codes: mx.array, quantization: AffineFormat) -> np.ndarray:
    """The product in float64."""
    scales, biases, group_size, bits = quantization
    words = np.array(codes)
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    values = stream.reshape(len(words), -1, bits) @ (1 << np.arange(bits))
    groups = values.reshape(len(words), -1, group_size).astype(np.float64)
    scale, bias = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (scales, biases))
    weight = (groups * scale[..., None] + bias[..., None]).reshape(len(words), -1)
    return np.array(x.astype(mx.float32)).astype(np.float64) @ weight.T


# Without a GPU, MLX's CPU product stands in for Metal's, and rounds 16-bit floats too often.
ON_METAL = [
    pytest.param("metal", dtype, marks=pytest.mark.metal)
    for dtype in (DTYPES if mx.metal.is_available() else [mx.float32])
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*ON_METAL, *itertools.product(["native", "chunked", "reference"], DTYPES)],
    ids=str,
)
def test_codes(backend: str, bits: int, dtype: mx.Dtype, request: pytest.FixtureRequest) -> None:
    if backend == "metal":
        request.getfixturevalue("metal")
    mx.random.seed(bits)
    for group_size in GROUP_SIZES:
        dims = 3 * group_size
        codes, quantization = quantize(40, dims, group_size, bits, dtype)
        # one row, and more
        rows = (1,) if group_size == 64 else (2, 3)
        x = mx.random.normal((*rows, dims)).astype(dtype)
        want = mx.array(exact(x.reshape(-1, dims), codes, quantization)).astype(mx.float32)
        tolerance = TOLERANCE[dtype if backend == "metal" else mx.float32]
        with use_backend(backend):
            try:
                got = dense_matmul(x, codes, quantization)
            except BackendError as error:
                pytest.skip(str(error))
            upstream = mx.random.normal(got.shape)
            gradient = mx.grad(
                lambda x: (dense_matmul(x, codes, quantization) * upstream).sum()  # noqa: B023
            )(x)
        assert got.dtype == mx.float32
        assert relative_error(got.reshape(-1, 40), want) <= tolerance
        with use_backend("reference"):
            identity = dense_matmul(mx.eye(dims), codes, quantization)
        want_gradient = (upstream @ identity.T).astype(dtype)
        assert relative_error(gradient, want_gradient) <= TOLERANCE[dtype]


@pytest.mark.parametrize("bits", [1, 2])
def test_rounded_activations(bits: int) -> None:
    mx.random.seed(bits)
    codes, quantization = quantize(40, 256, 64, bits)
    x, upstream = mx.random.normal((5, 256)), mx.random.normal((5, 40))
    multiply = partial(dense_matmul, weight=codes, quantization=quantization, activation_bits=8)
    with use_backend("reference"):
        want = multiply(x)
    exactly = dense_matmul(x, codes, quantization)
    for backend in ("native", "chunked"):
        with use_backend(backend):
            try:
                got = multiply(x)
            except BackendError as error:
                pytest.skip(str(error))
            by_x = mx.vjp(multiply, [x], [upstream])[1][0]
            of_exact = mx.vjp(lambda x: dense_matmul(x, codes, quantization), [x], [upstream])[1][0]
        assert relative_error(got, want) <= TOLERANCE[mx.float32]
        # a half of a step in each of many inputs
        assert 1e-4 < relative_error(got, exactly) < 2e-2
        assert relative_error(by_x, of_exact) <= TOLERANCE[mx.float32]


def test_rounding_is_asked_for_by_the_environment_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("mlx_mmfree.ops.dense_matmul")
    (few, few_variant), (four, four_variant) = (quantize(8, 64, 32, bits) for bits in (1, 4))
    x = mx.random.normal((2, 64))
    want, other = (
        dense_matmul(x, few, few_variant, activation_bits=8),
        dense_matmul(x, four, four_variant),
    )
    for cached in (module.rounds_activations, module._warn_of_rounding):
        cached.cache_clear()
    monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, "8")
    try:
        assert mx.array_equal(dense_matmul(x, four, four_variant), other)
        with pytest.warns(RuntimeWarning, match="are inexact: MLX_MMFREE_ACTIVATION_BITS=8 rounds"):
            got = dense_matmul(x, few, few_variant)
        assert mx.array_equal(got, want)
        module.rounds_activations.cache_clear()
        monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, "4")
        with pytest.raises(UsageError, match="must be 8 or unset but got '4'"):
            dense_matmul(x, few, few_variant)
    finally:
        module.rounds_activations.cache_clear()
    for weight, variant, bits in (
        (few, few_variant, 4),
        (four, four_variant, 8),
        (mx.ones((8, 64)), None, 8),
    ):
        with pytest.raises(
            ValueError, match="'activation_bits' must be 8, for codes of 1 or 2 bits"
        ):
            dense_matmul(x, weight, variant, activation_bits=bits)


def test_many_outputs_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mlx_mmfree.ops.dense_matmul.definition")
    monkeypatch.setattr(module, "BLOCK_WEIGHTS", 64 * 7)
    codes, quantization = quantize(40, 64, 32, 4, mx.bfloat16)
    x = mx.random.normal((3, 64))
    with use_backend("reference"):
        want = dense_matmul(x, codes, quantization)
    with use_backend("chunked"):
        got = dense_matmul(x, codes, quantization)
    assert relative_error(got, want) <= TOLERANCE[mx.float32]


def test_arguments_are_checked() -> None:
    x, (codes, quantization) = mx.ones((2, 64)), quantize(8, 64, 32, 4)
    for weight, variant, message in (
        (mx.ones((8, 65)), None, "'weight' must be a float matrix of 64 columns"),
        (codes, None, "'weight' must be a float matrix"),
        (codes[:, 1:], quantization, "'weight' must be a uint32 matrix of 8 columns"),
        (codes, quantization._replace(bits=3), "'quantization' must have 1, 2, 4, 6 or 8 bits"),
        (codes, quantization._replace(group_size=16), "groups of 32, 64 or 128 but got 4 and 16"),
        (codes, quantization._replace(group_size=128), "must have a multiple of 128 inputs"),
        (codes, quantization._replace(biases=mx.ones((8, 1))), "must be floats of one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            dense_matmul(x, weight, variant)
