"""Every architecture computes what its definitions say, in its training variant and packed."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.fusing import plain_definitions
from mlx_mmfree.layers.matrix import converted, matrices
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.fused import Fused
from tests.models.test_architectures import IMAGES, KNOWN
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error


def built(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    mx.random.seed(3)
    architecture = find(name)
    model: nn.Module = architecture.build(architecture.config.from_hub(architecture.tiny))
    if dtype != mx.float32:
        for matrix in matrices(model).values():
            if matrix.is_ternary:
                # activations are not rounded: a norm's last bit, of 8 in bfloat16, moves a code
                matrix.layer._quantize_activations = False
    return model.eval()


@pytest.mark.sample(1, of="name")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", [*KNOWN, *IMAGES])
def test_predictions(name: str, dtype: mx.Dtype, is_packed: bool) -> None:
    architecture, model = find(name), built(name, dtype)
    if is_packed:
        pack_linears(model)
    converted(model, dtype)
    given = architecture.sample(model.config)
    got = model.predictions(given)
    with plain_definitions():
        want = model.predictions(given)
    assert relative_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*KNOWN, *IMAGES])
def test_gradients(name: str) -> None:
    model = built(name)
    got = gradients(name, model)
    with plain_definitions():
        want = gradients(name, model)
    for key, gradient in got.items():
        assert relative_error(gradient, want[key]) <= GRADIENT_TOLERANCE, key


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*KNOWN, *IMAGES])
def test_gradients_of_16_bits(name: str) -> None:
    """Within the tolerance of what the definition gives, which is off float32 by itself."""
    model, exact = converted(built(name, mx.bfloat16), mx.bfloat16), built(name, mx.bfloat16)
    exact.update(tree_map(_as_float32, model.parameters()))
    got = gradients(name, model)
    with plain_definitions():
        own, want = gradients(name, model), gradients(name, exact)
    for key, gradient in got.items():
        most = TOLERANCE[mx.bfloat16] + relative_error(own[key], want[key])
        assert relative_error(gradient, own[key]) <= most, key


def _as_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if array.dtype == mx.bfloat16 else array


def gradients(name: str, model: nn.Module) -> dict[str, mx.array]:
    given = find(name).sample(model.config)

    def loss(model: nn.Module) -> mx.array:
        y = model.predictions(given).astype(mx.float32)
        return (y * mx.cos(mx.arange(y.shape[-1]))).sum()

    return dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))


@pytest.mark.parametrize("name", KNOWN)
def test_blocks_say_that_they_are_fused(name: str) -> None:
    blocks = [module for module in built(name).modules() if isinstance(module, Block)]
    assert blocks and all(isinstance(block, Fused) for block in blocks)
    assert repr(blocks[0]).startswith("Fused")
