"""Linears and norms of MLX by the operations of this library, and what takes their place."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import (
    BitLinear,
    Linear,
    PackedBitLinear,
    QuantizedLinear,
    RMSNorm,
    plain_definitions,
)
from mlx_mmfree.layers.fusing import Around, inputs, output
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.layers.matrix import matrix_of
from mlx_mmfree.layers.rotated import RotatedLinear
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.fused import fuse_operations
from mlx_mmfree.token_mixers import GQA
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

DTYPES = [mx.float32, mx.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    ("own", "of_mlx"),
    [
        (Linear(64, 24), nn.Linear(64, 24)),
        (Linear(64, 24, bias=False), nn.Linear(64, 24, bias=False)),
        (RMSNorm(64, eps=1e-6), nn.RMSNorm(64, eps=1e-6)),
        (QuantizedLinear(64, 24, True, 32, 4), nn.QuantizedLinear(64, 24, True, 32, 4)),
        (QuantizedLinear(64, 24, False, 32, 3), nn.QuantizedLinear(64, 24, False, 32, 3)),
        (
            QuantizedLinear(64, 24, False, 32, 4, "mxfp4"),
            nn.QuantizedLinear(64, 24, False, 32, 4, "mxfp4"),
        ),
    ],
    ids=["bias", "linear", "norm", "codes", "3 bits", "mxfp4"],
)
def test_results_and_gradients_are_those_of_mlx(
    own: nn.Module, of_mlx: nn.Module, rows: int, dtype: mx.Dtype
) -> None:
    own.set_dtype(dtype)
    of_mlx.set_dtype(dtype)
    of_mlx.update(own.parameters())
    x = mx.random.normal((rows, 64)).astype(dtype)

    def loss(parameters: dict[str, Any], x: mx.array, layer: nn.Module) -> mx.array:
        layer.update(parameters)
        return (layer(x).astype(mx.float32) * mx.cos(mx.arange(x.shape[0])[:, None])).sum()

    got, want = own(x), of_mlx(x)
    assert got.dtype == want.dtype and relative_error(got, want) <= TOLERANCE[dtype]
    # codes have none
    arguments = [0, 1] if own.trainable_parameters() else [1]
    gradients = [
        mx.grad(loss, argnums=arguments)(layer.trainable_parameters(), x, layer)
        for layer in (own, of_mlx)
    ]
    for (_, g), (_, w) in zip(*map(tree_flatten, gradients), strict=True):
        assert relative_error(g, w) <= max(GRADIENT_TOLERANCE, TOLERANCE[dtype])


def test_codes_of_a_linear_are_of_the_same_kind() -> None:
    linear = Linear(64, 24)
    codes = linear.to_quantized(32, 4)
    assert type(codes) is QuantizedLinear and mx.array_equal(codes.bias, linear.bias)
    assert type(linear.to_quantized(32, 4, mode="mxfp4")) is QuantizedLinear
    matrix = matrix_of(linear)
    assert matrix is not None and type(matrix.in_codes(32, 4)) is QuantizedLinear


def _doubled(kind: Any) -> Any:
    class Doubled(kind):
        def __call__(self, x: mx.array) -> mx.array:
            y: mx.array = 2 * super().__call__(x)
            return y

    return Doubled


def test_a_subclass_with_a_call_of_its_own_is_called() -> None:
    """No operation that knows its parameters passes it by."""
    x, residual = mx.random.normal((80, 64)), mx.random.normal((80, 64))
    for kind in (Linear, nn.Linear, BitLinear, PackedBitLinear):
        linear, norm = _doubled(kind)(64, 64, bias=False), RMSNorm(64)
        got = output((x,), linear, Around(x.dtype, None, norm, residual))
        assert relative_error(got, residual + linear(norm(x))) <= TOLERANCE[x.dtype], kind
        for part in inputs(x, [linear, linear], norm):
            assert relative_error(part, linear(norm(x))) <= TOLERANCE[x.dtype], kind
        matrix = matrix_of(linear)
        assert matrix is not None and not matrix.is_plain
    packed, doubled = BitLinear(64, 64).to_packed(), _doubled(RMSNorm)(64)
    got = output((x,), packed, Around(x.dtype, None, doubled, residual))
    assert relative_error(got, residual + packed(doubled(x))) <= TOLERANCE[x.dtype]


def test_a_channel_mixer_with_a_call_of_its_own_is_called() -> None:
    """Before projections that take the sum, and before others."""

    class Doubled(SwiGLU):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    def rotated(inputs: int, outputs: int, bias: bool = False) -> nn.Module:
        layer = RotatedLinear(inputs, outputs, group_size=64, bits=2, block=64)
        layer.weight, *_ = mx.quantize(mx.random.normal((outputs, inputs)), 64, 2)
        return layer

    for linear in (rotated, Linear):
        channel = Doubled(64, hidden_dims=64, linear=linear)
        block = fuse_operations(Block(64, GQA(64, num_heads=2), channel))
        x = mx.random.normal((1, 9, 64))
        with plain_definitions():
            want, _ = block(x)
        assert relative_error(block(x)[0], want) <= TOLERANCE[x.dtype]


def _block(linear: Callable[..., nn.Module], norm: Callable[..., nn.Module]) -> Block:
    mx.random.seed(2)
    channel = SwiGLU(32, hidden_dims=64, linear=linear)
    return Block(32, GQA(32, num_heads=4, linear=linear), channel, norm=norm)


def test_linears_and_norms_of_mlx_become_those_of_this_library_where_models_are_built() -> None:
    given, own = _block(nn.Linear, nn.RMSNorm), _block(Linear, RMSNorm)
    before = dict(tree_flatten(given.parameters()))
    fuse_operations(given)
    after = dict(tree_flatten(given.parameters()))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    kinds = {type(module) for module in given.modules()}
    assert {Linear, RMSNorm} <= kinds and not {nn.Linear, nn.RMSNorm} & kinds
    x = mx.random.normal((1, 40, 32))
    assert mx.array_equal(given(x)[0], fuse_operations(own)(x)[0])


def test_a_linear_of_mlx_works_after_a_model_was_built() -> None:
    """Put in the place of any linear, then with an adapter, then in codes."""
    architecture = find("llama")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    mx.random.seed(1)
    model = architecture.build(architecture.config.from_hub({**architecture.tiny, **sizes}))
    tokens = mx.array([[1, 2, 3, 4]])
    want, _ = model(tokens)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            other = nn.Linear(columns, rows, bias="bias" in module)
            other.update(module.parameters())
            model.update_modules(tree_unflatten([(path, other)]))
    assert relative_error(model(tokens)[0], want) <= TOLERANCE[want.dtype]
    assert add_adapters(model, lambda *_: True, rank=2)
    assert relative_error(model(tokens)[0], want) <= TOLERANCE[want.dtype]
    nn.quantize(model, 32, 8)
    assert relative_error(model(tokens)[0], want) <= 0.05
