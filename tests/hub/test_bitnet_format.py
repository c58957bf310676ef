"""The packed form that transformers writes."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub import bitnet_format
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.ops.ternary import pack_ternary, unpack_ternary
from tests.hub.checkpoints import GOLDENS
from tests.tolerances import TOLERANCE, relative_error


@pytest.fixture
def ops() -> dict[str, mx.array]:
    return mx.load(str(GOLDENS / "ops" / "golden.safetensors"))


def layer(ops: dict[str, mx.array], name: str, linear_class: str | None) -> PackedBitLinear:
    trits = ops["pack.ternary"]
    made = PackedBitLinear(trits.shape[1], trits.shape[0])
    made.weight = bitnet_format.repack(ops["pack.packed"], trits.shape[0])
    described = {} if linear_class is None else {"linear_class": linear_class}
    made.scale = bitnet_format.scale_of(described, ops[f"{name}.weight_scale"])
    return made


def test_trits(ops: dict[str, mx.array]) -> None:
    trits = ops["pack.ternary"].astype(mx.float32)
    repacked = bitnet_format.repack(ops["pack.packed"], trits.shape[0])
    assert mx.array_equal(repacked, pack_ternary(trits))
    assert bitnet_format.packed_shape(*trits.shape) == ops["pack.packed"].shape


@pytest.mark.parametrize(
    ("name", "linear_class"),
    [
        ("bitlinear_packed", None),
        ("bitlinear_packed", "bitlinear"),
        ("autobitlinear_offline", "autobitlinear"),
    ],
)
def test_scales(ops: dict[str, mx.array], name: str, linear_class: str | None) -> None:
    y = layer(ops, name, linear_class)(ops["tf_act_quant.x"])
    for got, want in zip(y, ops[f"{name}.y"], strict=True):
        assert relative_error(got, want) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 41])
@pytest.mark.parametrize("columns", [1, 16, 31, 32, 100])
def test_sizes_that_are_no_multiples(rows: int, columns: int) -> None:
    trits = np.random.default_rng(rows * columns).integers(-1, 2, (rows, columns))
    quarter = -(-rows // 4)
    packed = np.zeros((quarter, columns), np.uint8)
    for row in range(rows):
        packed[row % quarter] |= ((trits[row] + 1) << (2 * (row // quarter))).astype(np.uint8)
    repacked = bitnet_format.repack(mx.array(packed), rows)
    assert mx.array_equal(unpack_ternary(repacked, columns), mx.array(trits.astype(np.float32)))


@pytest.mark.parametrize(
    ("keys", "is_packed"),
    [
        ({}, True),
        ({"linear_class": "bitlinear"}, True),
        ({"linear_class": "autobitlinear"}, True),
        ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, True),
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, False),
    ],
    ids=str,
)
def test_known_forms(keys: dict[str, str], is_packed: bool) -> None:
    described = {"quant_method": "bitnet", **keys}
    bitnet_format.check_form(described)
    assert bitnet_format.is_packed(described) == is_packed


@pytest.mark.parametrize(
    "keys",
    [
        {"quantization_mode": "online"},
        {"linear_class": "bitlinear", "quantization_mode": "online"},
        {"linear_class": "linear"},
        {"quantization_mode": "later"},
        {"linear_class": ["autobitlinear"]},
    ],
    ids=str,
)
def test_unknown_forms(keys: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModelError, match="'linear_class' and 'quantization_mode' must"):
        bitnet_format.check_form({"quant_method": "bitnet", **keys})
