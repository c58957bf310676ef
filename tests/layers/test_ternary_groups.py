"""Linears that are trained for codes of 2 bits, against their definition in float64."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.layers import set_quantization_strength
from mlx_mmfree.layers.ternary_groups import Scales, TernaryGroupLinear, TernaryScheme, make_ternary
from tests.tolerances import TOLERANCE, relative_error

SCHEMES = [
    TernaryScheme(),
    TernaryScheme("row"),
    TernaryScheme("tensor"),
    TernaryScheme(threshold=0.7, keeps_mean=False),
    TernaryScheme("row", threshold=0.7, keeps_mean=False),
    TernaryScheme("tensor", threshold=0.0, keeps_mean=False),
    TernaryScheme(group_size=32),
]


def defined(weight: np.ndarray, scheme: TernaryScheme) -> np.ndarray:
    """The ternary matrix, share after share."""
    rows, dims = weight.shape
    found = np.zeros_like(weight)
    blocks: dict[Scales, tuple[int, int]] = {
        "group": (1, scheme.group_size),
        "row": (1, dims),
        "tensor": (rows, dims),
    }
    height, width = blocks[scheme.scales]
    for n in range(0, rows, height):
        for start in range(0, dims, width):
            part = weight[n : n + height, start : start + width]
            mean = np.abs(part).mean()
            kept = np.abs(part) > scheme.threshold * mean
            scale = mean if scheme.keeps_mean else np.abs(part)[kept].mean()
            found[n : n + height, start : start + width] = kept * np.sign(part) * np.float16(scale)
    return found


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_against_the_definition(scheme: TernaryScheme) -> None:
    rng = np.random.default_rng(3)
    # each group has a size of its own
    weight = rng.normal(size=(48, 256)) * np.repeat(rng.uniform(0.5, 2, (48, 8)), 32, axis=1)
    linear = nn.Linear(256, 48)
    linear.weight = mx.array(weight.astype(np.float32))
    layer = TernaryGroupLinear(linear, scheme)
    x = rng.normal(size=(5, 256))
    wanted = x @ defined(weight, scheme).T + np.array(linear.bias, np.float64)
    x32 = mx.array(x.astype(np.float32))
    assert relative_error(layer(x32), mx.array(wanted)) <= TOLERANCE[mx.float32]
    packed = layer.to_packed()
    assert (packed.bits, packed.group_size, packed.scales.dtype) == (
        2,
        scheme.group_size,
        mx.float16,
    )
    held = mx.dequantize(
        packed.weight,
        packed.scales.astype(mx.float32),
        packed.biases.astype(mx.float32),
        scheme.group_size,
        2,
    )
    assert mx.array_equal(held, layer.ternary_weight())


def test_the_gradient_is_that_of_the_ternary_matrix() -> None:
    layer = TernaryGroupLinear(nn.Linear(64, 24, bias=False), TernaryScheme())
    rng = np.random.default_rng(5)
    x, cotangent = (rng.normal(size=(7, dims)).astype(np.float32) for dims in (64, 24))

    def loss(weight: mx.array, x: mx.array) -> mx.array:
        layer.weight = weight
        return (layer(x) * mx.array(cotangent)).sum()

    ternary = np.array(layer.ternary_weight(), np.float64)
    of_weight, of_x = mx.grad(loss, (0, 1))(layer.weight, mx.array(x))
    assert (
        relative_error(of_x, mx.array(cotangent.astype(np.float64) @ ternary))
        <= TOLERANCE[mx.float32]
    )
    assert (
        relative_error(of_weight, mx.array(cotangent.T.astype(np.float64) @ x))
        <= TOLERANCE[mx.float32]
    )


def test_without_strength_it_is_the_dense_layer() -> None:
    dense = nn.Linear(64, 32)
    blocks = nn.Sequential(dense)
    x = mx.random.normal((3, 64))
    wanted = dense(x)
    make_ternary(blocks, TernaryScheme())
    assert set_quantization_strength(blocks, 0.0) == 1
    assert relative_error(blocks(x), wanted) <= TOLERANCE[mx.float32]
    assert set_quantization_strength(blocks, 1.0) == 1
    assert relative_error(blocks(x), wanted) > 0.1


def test_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="'group_size' must divide the 48 inputs but is 64"):
        TernaryGroupLinear(nn.Linear(48, 8), TernaryScheme())
