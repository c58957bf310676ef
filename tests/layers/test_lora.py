"""Adapters against their dense equivalents."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import BitLinear, PackedBitLinear, PackedLinear
from mlx_mmfree.layers.lora import (
    DoRAEmbedding,
    DoRALinear,
    LoRAEmbedding,
    LoRALinear,
    add_adapters,
    remove_adapters,
)
from mlx_mmfree.layers.matrix import matrix_of
from mlx_mmfree.ops import pack_ternary
from mlx_mmfree.ops.activations import relu
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]


def _scaled() -> PackedLinear:
    """Ternary with a scale for each row and column."""
    layer = PackedLinear(96, 40, True, has_row_scales=True, has_column_scales=True)
    layer.weight = pack_ternary(mx.random.randint(-1, 2, (40, 96)).astype(mx.float32))
    for name in ("scale", "input_scale"):
        layer[name] = mx.random.uniform(0.5, 1.5, layer[name].shape)
    return layer


def _bases() -> dict[str, nn.Module]:
    mx.random.seed(0)
    return {
        "dense": nn.Linear(96, 40),
        "quantized": nn.Linear(96, 40).to_quantized(group_size=32, bits=4),
        "ternary": BitLinear(96, 40, bias=True),
        "packed": BitLinear(96, 40, norm_eps=1e-6, rounding="half_away").to_packed(),
        "scaled": _scaled(),
        "weight_only": BitLinear(96, 40, quantize_activations=False).to_packed(),
    }


def _dense_weight(base: nn.Module) -> mx.array:
    matrix = matrix_of(base)
    assert matrix is not None
    return matrix.multiply(mx.eye(matrix.input_dims)).T


def _trained(layer: LoRALinear | LoRAEmbedding) -> LoRALinear | LoRAEmbedding:
    layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    if "m" in layer:
        layer.m = layer.m * mx.random.uniform(0.5, 1.5, layer.m.shape)
    return layer


@pytest.mark.parametrize("name", _bases())
@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_a_fresh_adapter_changes_nothing(name: str, kind: type[LoRALinear]) -> None:
    base, x = _bases()[name], mx.random.normal((3, 96))
    assert relative_error(kind(base)(x), base(x)) <= FLOAT32


@pytest.mark.parametrize("name", _bases())
@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_linear_equals_the_dense_formula(name: str, kind: type[LoRALinear]) -> None:
    base, x = _bases()[name], mx.random.normal((3, 96))
    layer = _trained(kind(base, rank=4, scale=2.0))

    def formula(x: mx.array, a: mx.array, b: mx.array, m: mx.array | None) -> mx.array:
        bias = base.bias if "bias" in base else 0.0
        inner = base.norm(x) if "norm" in base else x
        y = base(x) - bias + 2.0 * (inner @ a @ b)
        if m is not None:
            adapted = _dense_weight(base) + 2.0 * mx.stop_gradient(a @ b).T
            y = m / mx.linalg.norm(adapted, axis=1) * y
        return y + bias

    m = layer.m if "m" in layer else None
    assert relative_error(layer(x), formula(x, layer.lora_a, layer.lora_b, m)) <= FLOAT32
    weights = mx.cos(mx.arange(120)).reshape(3, 40)
    _, got = nn.value_and_grad(layer, lambda x: (weights * layer(x)).sum())(x)
    arguments = [layer.lora_a, layer.lora_b] + ([] if m is None else [m])
    want = mx.grad(
        lambda *p: (weights * formula(x, p[0], p[1], p[2] if len(p) > 2 else None)).sum(),
        argnums=list(range(len(arguments))),
    )(*arguments)
    got_by_name = dict(tree_flatten(got))
    assert set(got_by_name) == {"lora_a", "lora_b", *(() if m is None else ("m",))}
    for name, gradient in zip(("lora_a", "lora_b", "m"), want, strict=False):
        assert relative_error(got_by_name[name], gradient) <= GRADIENT_TOLERANCE
    got_x = mx.grad(lambda x: (weights * layer(x)).sum())(x)
    want_x = mx.grad(lambda x: (weights * formula(x, *layer_arrays(layer))).sum())(x)
    assert relative_error(got_x, want_x) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("kind", [DoRALinear, DoRAEmbedding])
def test_a_row_of_zeros_stays(kind: Any) -> None:
    is_linear = kind is DoRALinear
    base: Any = nn.Linear(64, 8, bias=False) if is_linear else nn.Embedding(8, 64)
    base.weight = mx.where(mx.arange(8)[:, None] == 3, 0, base.weight)
    layer = kind(base)
    x = mx.ones((1, 64)) if is_linear else mx.arange(8)
    assert relative_error(layer(x), base(x)) <= FLOAT32
    _, gradient = nn.value_and_grad(layer, lambda x: layer(x).square().sum())(x)
    assert all(mx.isfinite(array).all() for _, array in tree_flatten(gradient))
    if is_linear:
        assert relative_error(layer.merged(), base.weight) <= FLOAT32


def layer_arrays(layer: LoRALinear) -> tuple[mx.array, mx.array, mx.array | None]:
    return layer.lora_a, layer.lora_b, layer.m if "m" in layer else None


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("kind", [LoRAEmbedding, DoRAEmbedding])
def test_embedding_equals_the_dense_formula(kind: type[LoRAEmbedding], is_quantized: bool) -> None:
    mx.random.seed(1)
    base: nn.Module = nn.Embedding(50, 64)
    if is_quantized:
        base = base.to_quantized(group_size=32, bits=8)
    layer = _trained(kind(base, rank=4, scale=2.0))
    table = base(mx.arange(50)) + 2.0 * (layer.lora_a @ layer.lora_b)
    if "m" in layer:
        table = layer.m[:, None] * table / mx.linalg.norm(table, axis=1, keepdims=True)
    tokens, x = mx.array([[3, 7, 7]]), mx.random.normal((2, 64))
    assert relative_error(layer(tokens), table[tokens]) <= FLOAT32
    assert relative_error(layer.as_linear(x), x @ table.T) <= FLOAT32


def test_adapters_go_on_and_off() -> None:
    model = nn.Sequential(BitLinear(32, 16).to_packed(), relu, nn.Linear(16, 8))
    before = dict(tree_flatten(model.parameters()))
    names = add_adapters(model, lambda name, module: True, rank=2)
    assert names == ["layers.2", "layers.0"] or names == ["layers.0", "layers.2"]
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert trainable == {f"layers.{n}.lora_{part}" for n in (0, 2) for part in "ab"}
    remove_adapters(model)
    assert isinstance(model.layers[0], PackedBitLinear)
    assert dict(tree_flatten(model.parameters())).keys() == before.keys()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="'rank' must be positive"):
        LoRALinear(nn.Linear(4, 4), rank=0)
    with pytest.raises(ValueError, match="'dropout' must be"):
        LoRALinear(nn.Linear(4, 4), dropout=1.0)
