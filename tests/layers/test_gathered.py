"""Products of rows with one of several matrices each, beside float64."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.layers.linear import gathered_product
from tests.tolerances import TOLERANCE, relative_error

EXPERTS, OUTPUTS, DIMS = 6, 48, 128


def in_codes(dtype: mx.Dtype, bits: int) -> tuple[nn.QuantizedLinear, np.ndarray]:
    """A layer of all experts, and their matrices in float64."""
    mx.random.seed(bits)
    layer = nn.QuantizedLinear(DIMS, EXPERTS * OUTPUTS, False, 64, bits)
    codes = mx.quantize(mx.random.normal((EXPERTS * OUTPUTS, DIMS)), 64, bits)
    layer.weight, layer.scales, layer.biases = codes[0], *(x.astype(dtype) for x in codes[1:])
    scales, biases = (x.astype(mx.float32) for x in (layer.scales, layer.biases))
    matrix = mx.dequantize(layer.weight, scales, biases, 64, bits)
    return layer, np.array(matrix, np.float64).reshape(EXPERTS, OUTPUTS, DIMS)


# fewer rows than experts, and more
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 2)], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_and_their_gradient(shape: tuple[int, ...], dtype: mx.Dtype, bits: int) -> None:
    layer, matrices = in_codes(dtype, bits)
    x, indices = mx.random.normal((*shape, DIMS)), mx.random.randint(0, EXPERTS, shape)
    dy = mx.random.normal((*shape, OUTPUTS))
    [y], [dx] = mx.vjp(lambda x: gathered_product(layer, x, indices, EXPERTS), [x], [dy])
    chosen = matrices[np.array(indices)]
    want = np.einsum("...d,...nd->...n", np.array(x, np.float64), chosen)
    want_dx = np.einsum("...n,...nd->...d", np.array(dy, np.float64), chosen)
    assert y.dtype == mx.float32
    assert relative_error(y, mx.array(want)) <= TOLERANCE[mx.float32]
    assert relative_error(dx, mx.array(want_dx)) <= TOLERANCE[mx.float32]
