"""The packed format of dense linears whose weights are already ternary."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.hub.checkpoint.formats.packed import FORMAT
from mlx_mmfree.layers import PackedLinear
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.ternary.values import pack_ternary_values
from mlx_mmfree.ops import pack_ternary
from tests.tolerances import TOLERANCE, relative_error


def dense(rows: int, columns: int, scales: mx.array, bias: bool = False) -> nn.Linear:
    mx.random.seed(rows + columns)
    linear = nn.Linear(columns, rows, bias=bias)
    trits = mx.random.randint(-1, 2, (rows, columns)).astype(mx.float32)
    trits[0], trits[:, 0] = 1.0, -1.0
    linear.weight = trits * scales
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("split", ["none", "rows", "columns"])
def test_equals_the_dense_layer(split: str, dtype: mx.Dtype, bias: bool) -> None:
    rows, columns = 24, 52
    size = {"none": (1, 1), "rows": (rows, 1), "columns": (1, columns)}[split]
    parts = mx.where(mx.arange(max(size)) < 20, 0.25, 0.75).reshape(size)
    linear = dense(rows, columns, parts, bias)
    linear.set_dtype(dtype)
    packed = pack_ternary_values(linear)
    assert isinstance(packed, PackedLinear)
    assert packed.scale.shape == ((rows,) if split == "rows" else (1,))
    assert ("input_scale" in packed) == (split == "columns")
    x = mx.random.normal((2, 3, columns)).astype(dtype)
    y = packed(x)
    assert y.dtype == dtype
    want = linear(x.astype(mx.float32)) if dtype == mx.float32 else _in_float32(linear, x)
    assert relative_error(y, want) <= TOLERANCE[dtype]


def _in_float32(linear: nn.Linear, x: mx.array) -> mx.array:
    y = x.astype(mx.float32) @ linear.weight.astype(mx.float32).T
    return y + linear.bias.astype(mx.float32) if "bias" in linear else y


def test_other_weights_stay_dense() -> None:
    assert pack_ternary_values(nn.Linear(64, 32)) is None
    zeros = nn.Linear(64, 32)
    zeros.weight = mx.zeros((32, 64))
    assert pack_ternary_values(zeros) is None
    late = dense(40, 64, mx.array(0.5))
    late.weight[-1, -1] = 0.25
    assert pack_ternary_values(late) is None


def test_rows_of_zeros_are_kept() -> None:
    linear = dense(16, 32, mx.where(mx.arange(16) < 8, 0.5, 1.0)[:, None])
    linear.weight[:, :] = mx.where(mx.arange(16)[:, None] == 3, 0.0, linear.weight)
    packed = pack_ternary_values(linear)
    assert packed is not None and mx.all(packed.scale > 0).item()
    x = mx.random.normal((4, 32))
    assert relative_error(packed(x), linear(x)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_floats(group: int, dtype: mx.Dtype, bias: bool) -> None:
    """The largest group that has one size is found, and none where a single number differs."""
    parts = 0.25 + 0.125 * mx.random.randint(0, 2, (24, 384 // group))
    linear = dense(24, 384, mx.repeat(parts, group, axis=1), bias)
    linear.weight[2, :group] = 0.0
    linear.set_dtype(dtype)
    packed = pack_ternary_values(linear)
    assert isinstance(packed, nn.QuantizedLinear)
    assert (packed.group_size, packed.bits, packed.scales.dtype) == (group, 2, dtype)
    assert ("bias" in packed) == bias
    arrays = packed.weight, packed.scales, packed.biases
    matrix = mx.dequantize(*arrays, packed.group_size, packed.bits)
    assert mx.array_equal(matrix + 0, linear.weight + 0)
    linear.weight[-1, -1] = 2 * linear.weight[-1, -2] + 0.125
    assert pack_ternary_values(linear) is None


@pytest.mark.parametrize("split", ["none", "rows", "columns", "groups"])
def test_affine_groups(split: str) -> None:
    rows, columns, group = 8, 128, 32
    made = nn.QuantizedLinear(columns, rows, False, group, 2)
    made.weight = pack_ternary(mx.random.randint(-1, 2, (rows, columns)))
    shapes = {"none": (1, 1), "rows": (rows, 1), "columns": (1, 4), "groups": (rows, 4)}
    scales = mx.random.uniform(0.1, 1.0, shapes[split])
    made.scales = mx.contiguous(mx.broadcast_to(scales, (rows, 4)))
    made.biases = -made.scales
    x = mx.random.normal((3, columns))
    layer = FORMAT.simplify(matrices(made)[""])
    if split == "groups":
        assert layer is None
        return
    assert isinstance(layer, PackedLinear)
    assert relative_error(layer(x), made(x)) <= TOLERANCE[mx.float32]


def test_codes_are_never_trained() -> None:
    layer = PackedLinear(32, 8, bias=True, has_row_scales=True, has_column_scales=True)
    layer.unfreeze()
    assert [name for name, _ in tree_flatten(layer.trainable_parameters())] == ["bias"]
