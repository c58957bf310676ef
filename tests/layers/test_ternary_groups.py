"""Linears that are trained for codes of 2 bits, against their definition in float64."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.layers import set_quantization_strength
from mlx_mmfree.layers.ternary.groups import Scales, TernaryGroupLinear, TernaryScheme, make_ternary
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
            is_nonzero = np.abs(part) > scheme.threshold * mean
            scale = mean if scheme.keeps_mean else np.abs(part)[is_nonzero].mean()
            found[n : n + height, start : start + width] = (
                is_nonzero * np.sign(part) * np.float16(scale)
            )
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
    unpacked = mx.dequantize(
        packed.weight,
        packed.scales.astype(mx.float32),
        packed.biases.astype(mx.float32),
        scheme.group_size,
        2,
    )
    assert mx.array_equal(unpacked, layer.ternary_weight())


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
    with pytest.raises(ValueError, match="must divide the 48 inputs but are 64 and 0"):
        TernaryGroupLinear(nn.Linear(48, 8), TernaryScheme())
    with pytest.raises(ValueError, match="must divide the 192 inputs but are 64 and 128"):
        TernaryGroupLinear(nn.Linear(192, 8), TernaryScheme(block=128))
    with pytest.raises(ValueError, match="'block' must be 0 for a linear with a bias but is 64"):
        TernaryGroupLinear(nn.Linear(64, 8), TernaryScheme(block=64))


def sylvester(size: int) -> np.ndarray:
    """The Hadamard matrix, float64, of length 1 in each row."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(size)


def test_a_rotated_matrix() -> None:
    rng = np.random.default_rng(7)
    weight = rng.normal(size=(24, 128)) * rng.uniform(0.1, 3, 128)
    linear = nn.Linear(128, 24, bias=False)
    linear.weight = mx.array(weight.astype(np.float32))
    layer = TernaryGroupLinear(linear, TernaryScheme(block=32))
    packed = layer.to_packed()
    signs = np.array(packed.signs, np.float64)
    assert sorted(set(signs)) == [-1, 1]
    rotation = signs[:, None] * np.kron(np.eye(4), sylvester(32))
    ternary = defined(weight @ rotation, TernaryScheme())
    x, cotangent = rng.normal(size=(5, 128)), rng.normal(size=(5, 24))
    wanted = mx.array(x @ rotation @ ternary.T)
    x32, cotangent32 = (mx.array(each.astype(np.float32)) for each in (x, cotangent))
    for y in (layer(x32), layer.multiply(x32), packed(x32)):
        assert relative_error(y, wanted) <= TOLERANCE[mx.float32]

    def loss(weight: mx.array, x: mx.array) -> mx.array:
        layer.weight = weight
        return (layer(x) * cotangent32).sum()

    # straight-through: the rotations of both sides undo each other in the gradient of the weight
    of_weight, of_x = mx.grad(loss, (0, 1))(layer.weight, x32)
    assert relative_error(of_weight, mx.array(cotangent.T @ x)) <= TOLERANCE[mx.float32]
    wanted = mx.array(cotangent @ ternary @ rotation.T)
    assert relative_error(of_x, wanted) <= TOLERANCE[mx.float32]
    set_quantization_strength(nn.Sequential(layer), 0.0)
    assert relative_error(layer(x32), mx.array(x @ weight.T)) <= TOLERANCE[mx.float32]
