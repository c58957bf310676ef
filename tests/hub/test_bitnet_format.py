"""The packed format that transformers writes."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub import convert, load_model, open_checkpoint
from mlx_mmfree.hub.checkpoint.formats import bitnet
from mlx_mmfree.ops.ternary import unpack_ternary
from tests.hub.checkpoints import tiny_transformer, write_bitnet_checkpoint


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 41])
@pytest.mark.parametrize("columns", [1, 16, 31, 32, 100])
def test_sizes_that_are_no_multiples(rows: int, columns: int) -> None:
    trits = np.random.default_rng(rows * columns).integers(-1, 2, (rows, columns))
    quarter = -(-rows // 4)
    packed = np.zeros((quarter, columns), np.uint8)
    for row in range(rows):
        packed[row % quarter] |= ((trits[row] + 1) << (2 * (row // quarter))).astype(np.uint8)
    repacked = bitnet.repack(mx.array(packed), rows)
    assert mx.array_equal(unpack_ternary(repacked, columns), mx.array(trits.astype(np.float32)))


def test_a_matrix_of_bitnet_2b_4t() -> None:
    """Every code of 6,912 x 2,560 comes to its index, code 3 of a damaged file too."""
    rows, columns = 6_912, 2_560
    packed = np.random.default_rng(0).integers(0, 256, (rows // 4, columns), np.uint8)
    codes = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)]).astype(np.uint32)
    words = sum(codes[:, first::16] << (2 * first) for first in range(16))
    assert mx.array_equal(bitnet.repack(mx.array(packed), rows), mx.array(words))


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
def test_known_formats(keys: dict[str, str], is_packed: bool) -> None:
    described = {"quant_method": "bitnet", **keys}
    bitnet.check_format(described)
    assert bitnet.is_packed(described) == is_packed


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
def test_unknown_formats(keys: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModelError, match="'linear_class' and 'quantization_mode' must"):
        bitnet.check_format({"quant_method": "bitnet", **keys})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("linear_class", "is_scaled"), [("autobitlinear", True), ("bitlinear", False), (None, False)]
)
def test_bias(tmp_path: Path, linear_class: str | None, is_scaled: bool) -> None:
    """transformers multiplies the bias by the scale in `autobitlinear`, not in `bitlinear`."""
    model = tiny_transformer("qwen3", attention_bias=True)
    stored = mx.random.normal((24,))
    model.blocks[0].token_mixer.query_proj.bias = stored
    write_bitnet_checkpoint(tmp_path / "s", model, linear_class)
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m")
    for folder in (tmp_path / "s", tmp_path / "m"):
        layer = load_model(folder).blocks[0].token_mixer.query_proj
        assert mx.array_equal(layer.bias, stored * layer.scale if is_scaled else stored)
