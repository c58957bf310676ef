"""Rotary positions."""

import pytest

from mlx_mmfree.layers import RoPE
from tests.goldens.mixers.files import GoldenFile, assert_close, golden


@golden("rope__both_layouts")
@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_rope(file: GoldenFile, layout: str) -> None:
    rope = RoPE(
        file.hyper["head_dim"],
        base=file.hyper["base"],
        is_interleaved=layout == "interleaved",
    )
    compared = [name for name in file.out if name.endswith(layout)]
    assert compared
    for name in compared:
        x = file.inputs[name.partition("_")[0]]
        assert_close(rope(x, offset=file.hyper["offset"]), file.out[name])
