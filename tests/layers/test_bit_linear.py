"""BitLinear: both formats agree bit for bit, gradients, packing, other dtypes."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import (
    BitLinear,
    PackedBitLinear,
    TiedBitLinear,
    pack_linears,
    set_quantization_strength,
)
from mlx_mmfree.ops import ternarize
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

FORMATS: list[dict[str, Any]] = [
    {},
    {"norm_eps": 1e-6, "rounding": "half_away"},
    {"bias": True},
    {"norm_eps": 1e-5, "bias": True},
    {"quantize_activations": False},
    {"quantize_activations": False, "norm_eps": 1e-6},
]


def _layer(input_dims: int = 100, output_dims: int = 33, **options: Any) -> BitLinear:
    mx.random.seed(0)
    layer = BitLinear(input_dims, output_dims, **options)
    for _, value in tree_flatten(layer.parameters()):
        value += 0.1 * mx.random.normal(value.shape)
    return layer


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_packed_equals_training_variant(options: dict[str, Any], rows: int) -> None:
    layer = _layer(**options)
    x = mx.random.normal((rows, 100))
    if options.get("quantize_activations", True):
        assert mx.array_equal(layer.to_packed()(x), layer(x))
    else:
        assert relative_error(layer.to_packed()(x), layer(x)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("options", FORMATS[:4], ids=str)
def test_rows_do_not_depend_on_each_other(options: dict[str, Any]) -> None:
    layer = _layer(**options).to_packed()
    x = mx.random.normal((64, 100))
    assert mx.array_equal(layer(x)[3:4], layer(x[3:4]))


def test_gradients_are_those_of_the_quantised_linear() -> None:
    layer = _layer(norm_eps=1e-6)
    x, upstream = mx.random.normal((7, 100)), mx.random.normal((7, 33))
    trits, m = ternarize(layer.weight)
    y = mx.fast.rms_norm(x, layer.norm.weight, 1e-6)
    s = 127 / mx.abs(y).max(-1, keepdims=True)
    quantized = mx.round(y * s) / s

    def loss(layer: BitLinear, x: mx.array) -> mx.array:
        return (layer(x) * upstream).sum()

    gradient = nn.value_and_grad(layer, loss)(layer, x)[1]
    want_weight = upstream.T @ quantized
    assert relative_error(gradient["weight"], want_weight) <= GRADIENT_TOLERANCE
    got_x = mx.grad(loss, argnums=1)(layer, x)
    through_norm = mx.vjp(
        lambda x: mx.fast.rms_norm(x, layer.norm.weight, 1e-6), [x], [upstream @ (trits * m)]
    )[1][0]
    assert relative_error(got_x, through_norm) <= GRADIENT_TOLERANCE


def test_packed_format_passes_the_gradient_to_its_input() -> None:
    layer = _layer(norm_eps=1e-6)
    x = mx.random.normal((7, 100))
    got = mx.grad(lambda x: layer.to_packed()(x).sum())(x)
    assert relative_error(got, mx.grad(lambda x: layer(x).sum())(x)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_low_precision_keeps_the_dtype(dtype: mx.Dtype) -> None:
    layer = _layer()
    x = mx.random.normal((4, 100))
    y = layer(x.astype(dtype))
    assert y.dtype == dtype
    assert relative_error(y, layer(x.astype(dtype).astype(mx.float32))) <= TOLERANCE[dtype]


def test_packed_codes_cannot_be_trained() -> None:
    packed = _layer(norm_eps=1e-6, bias=True).to_packed()
    packed.unfreeze()
    assert {name for name, _ in tree_flatten(packed.trainable_parameters())} == {
        "norm.weight",
        "bias",
    }


def test_tied_head_reads_the_embedding() -> None:
    mx.random.seed(1)
    embedding = nn.Embedding(50, 64)
    head = TiedBitLinear(embedding, norm_eps=1e-6)
    untied = BitLinear(64, 50, norm_eps=1e-6)
    untied.weight = embedding.weight
    x = mx.random.normal((3, 64))
    assert mx.array_equal(head(x), untied(x))
    assert mx.array_equal(head.to_packed()(x), untied(x))
    assert [name for name, _ in tree_flatten(head.parameters())] == ["norm.weight"]


def test_pack_linears_reaches_every_depth() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = [BitLinear(32, 32, norm_eps=1e-6), nn.Linear(32, 32)]
            self.head = BitLinear(32, 8)

    model = pack_linears(Model())
    assert isinstance(model.stack[0], PackedBitLinear)
    assert isinstance(model.stack[1], nn.Linear)
    assert isinstance(model.head, PackedBitLinear)


@pytest.mark.parametrize("sizes", [(0, 3), (3, -1)])
def test_sizes_must_be_positive(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"\[BitLinear\] '(in|out)put_dims' must be positive"):
        BitLinear(*sizes)


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_part_of_the_quantisation(options: dict[str, Any], strength: float) -> None:
    layer = _layer(**options)
    x, upstream = mx.random.normal((7, 100)), mx.random.normal((7, 33))
    eps = options.get("norm_eps")
    trits, m = ternarize(layer.weight)
    weight = layer.weight + strength * (trits * m - layer.weight)

    def inner(x: mx.array) -> mx.array:
        return x if eps is None else mx.fast.rms_norm(x, layer.norm.weight, eps)

    y = inner(x)
    if options.get("quantize_activations", True):
        s = 127 / mx.abs(y).max(-1, keepdims=True)
        y = y + strength * (mx.round(y * s) / s - y)
    want = y @ weight.T + (layer.bias if "bias" in layer else 0)
    assert set_quantization_strength(nn.Sequential(layer), strength) == 1
    assert relative_error(layer(x), want) <= TOLERANCE[mx.float32]

    def loss(layer: BitLinear, x: mx.array) -> mx.array:
        return (layer(x) * upstream).sum()

    gradient = nn.value_and_grad(layer, loss)(layer, x)[1]
    assert relative_error(gradient["weight"], upstream.T @ y) <= GRADIENT_TOLERANCE
    got_x = mx.grad(loss, argnums=1)(layer, x)
    assert relative_error(got_x, mx.vjp(inner, [x], [upstream @ weight])[1][0]) <= (
        GRADIENT_TOLERANCE
    )


def test_all_of_the_quantisation_is_the_layer_itself() -> None:
    layer, x = _layer(norm_eps=1e-6), mx.random.normal((7, 100))
    head = TiedBitLinear(nn.Embedding(50, 100), norm_eps=1e-6)
    model = nn.Sequential(layer, nn.Linear(33, 100), head)
    want = model(x)
    assert set_quantization_strength(model, 0.5) == 2
    assert relative_error(model(x), want) > TOLERANCE[mx.float32]
    set_quantization_strength(model, 1)
    assert mx.array_equal(model(x), want)
    with pytest.raises(ValueError, match="'strength' must be from 0 to 1"):
        set_quantization_strength(model, 1.5)
