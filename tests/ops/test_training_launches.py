"""How many operations a layer takes in training on a GPU, counted in the graph of loss and gradients.

MLX's fast operations, their gradients and the library's kernels are stand-ins that count as one each;
views count as none. Of launches, a concatenation is one for each part, and a pad two. A layer's own are
what a model of three layers has beyond one of two.
"""

import shutil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.layers import PackedLinear, pack_linears
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops import Projection, bit_linear, use_backend
from mlx_mmfree.ops.backend import compilation
from mlx_mmfree.ops.backend.self_check import packed_pattern
from mlx_mmfree.ops.bit_linear import Options, definition
from mlx_mmfree.ops.ternary import packed_width, unpack_ternary
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer_step import BatchGradient
from tests import graph
from tests.ops.test_layer_launches import MODELS
from tests.tolerances import TOLERANCE, relative_error

# where all weights are trained, and where adapters of packed matrices are
COUNTS = {
    "hgrn_bit": (277, 334),
    "bitnet": (245, 273),
    "ternary llama": (240, 268),
    "dense llama": (55, 170),
    "qwen3": (63, 178),
    "linear layer of qwen3.5": (684, 807),
    "full layer of qwen3.5": (73, 188),
}
# the same, once MLX has fused them
LAUNCHES = {
    "hgrn_bit": (165, 220),
    "bitnet": (147, 178),
    "ternary llama": (143, 176),
    "dense llama": (46, 106),
    "qwen3": (52, 112),
    "linear layer of qwen3.5": (567, 617),
    "full layer of qwen3.5": (62, 122),
}


def _model(name: str, layers: int, is_packed: bool) -> Decoder:
    model_type, options = MODELS[name]
    architecture = find(model_type)
    head_dim = architecture.tiny.get("head_dim")
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": 2048, "head_dim": head_dim}
    config = architecture.config.from_hub({**architecture.tiny, **options, **sizes})
    model: Decoder = architecture.build(config)
    if is_packed:
        pack_linears(model)
        model.set_dtype(mx.bfloat16)
        add_adapters(model, lambda path, _: path.startswith("blocks"))
    mx.eval(model.parameters())
    return model


def _operations(model: Decoder, length: int) -> Any:
    batch = Batch.of_rows(np.ones((2, length + 1), np.int32))
    return graph.operations(nn.value_and_grad(model, next_token_loss)(model, batch))


@pytest.mark.sample(2)
@pytest.mark.usefixtures("recorded", "traced")
@pytest.mark.parametrize("is_packed", [False, True], ids=["floats", "packed"])
@pytest.mark.parametrize("name", COUNTS)
def test_operations_of_a_layer(name: str, is_packed: bool) -> None:
    count = COUNTS[name][is_packed]
    found = []
    for length in (256, 2048):
        small, large = (_operations(_model(name, n, is_packed), length) for n in (2, 3))
        found.append((large - small, small))
    added = found[0][0]
    # there is no work for each position
    assert found[0] == found[1]
    assert added.total() == count, added


@pytest.mark.sample(2)
@pytest.mark.skipif(shutil.which("g++") is None, reason="without a C++ compiler nothing is fused")
@pytest.mark.usefixtures("recorded", "traced")
@pytest.mark.parametrize("is_packed", [False, True], ids=["floats", "packed"])
@pytest.mark.parametrize("name", COUNTS)
def test_launches_of_a_compiled_layer(
    name: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's step is compiled with the kernels and their gradients, and fused."""
    monkeypatch.setattr(compilation, "_CPU", mx.Device(mx.gpu))
    batch = Batch.of_rows(np.ones((2, 65), np.int32))
    small, large = (
        graph.launches(BatchGradient(_model(name, layers, is_packed), next_token_loss, True)(batch))
        for layers in (2, 3)
    )
    # what is fused may lie in two layers
    assert large.total() - small.total() == LAUNCHES[name][is_packed]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("quantize", [False, True])
def test_the_gradient_of_a_ternary_product_is_one_dense_product(
    dtype: mx.Dtype, quantize: bool
) -> None:
    rows, dims, outputs = 70, 100, (33, 40)
    matrices = [
        Projection(packed_pattern(count, packed_width(dims)), mx.array([0.5])) for count in outputs
    ]
    x, given = mx.zeros((rows, dims), dtype), mx.zeros((rows, sum(outputs)), dtype)
    gradients = mx.vjp(lambda x: bit_linear(x, matrices, quantize=quantize), [x], [given])[1]
    found = graph.operations(gradients)
    assert found["Matmul"] == len(outputs)
    assert found["QuantizedMatmul"] == 0
    options = Options(quantize=quantize)
    variant = definition.Variant.of(options)
    arrays = variant.flat(x, matrices, None, None)
    recorded = graph.recorded_operations(
        lambda x, given: definition._gradients(variant, [x, *arrays[1:]], [given], [])[0], x, given
    )
    products = [operation.inputs for operation in recorded if operation.name == "Matmul"]
    assert products == [(dtype, dtype)] * len(outputs)


@pytest.mark.exhaustive
@pytest.mark.metal
@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("has_row_scales", [False, True])
def test_values_of_that_gradient(dtype: mx.Dtype, has_row_scales: bool) -> None:
    """Against the straight-through gradient of the trits in float64."""
    rows, dims, outputs = 70, 100, 33
    weight = packed_pattern(outputs, packed_width(dims))
    scale = (mx.arange(outputs if has_row_scales else 1) + 3) / 8
    x, given = (
        mx.random.normal((rows, size), key=mx.random.key(size)).astype(dtype)
        for size in (dims, outputs)
    )
    trits, y, factor = (
        np.array(array.astype(mx.float32), np.float64)
        for array in (unpack_ternary(weight, dims), given, scale)
    )
    want = mx.array(((y * factor) @ trits).astype(np.float32))
    matrix = (Projection(weight, scale),)
    layer = PackedLinear(dims, outputs, has_row_scales=has_row_scales)
    layer.weight, layer.scale = weight, scale
    with use_backend("metal"):
        for function in (layer, lambda x: bit_linear(x, matrix)):
            got = mx.vjp(function, [x], [given])[1][0]
            assert got.dtype == dtype
            assert relative_error(got, want) <= TOLERANCE[dtype]
