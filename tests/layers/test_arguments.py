"""Sizes and axes that no layer or mixer takes are refused by name."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import GQA, MLGRU, BitLinear, SwiGLU
from mlx_mmfree.channel_mixers import FeedForward, GeGLU
from mlx_mmfree.layers import ShortConvolution
from mlx_mmfree.layers.lora import LoRALinear
from mlx_mmfree.layers.rope import RoPE


@pytest.mark.parametrize(
    ("make", "place", "name"),
    [
        (lambda size: MLGRU(size), "MLGRU", "dims"),
        (lambda size: MLGRU(8, hidden_dims=size), "MLGRU", "hidden_dims"),
        (lambda size: GQA(size), "GQA", "dims"),
        (lambda size: GQA(8, num_heads=size), "GQA", "num_heads"),
        (lambda size: GQA(8, num_heads=2, num_kv_heads=size), "GQA", "num_kv_heads"),
        (lambda size: GQA(8, num_heads=2, head_dim=size), "GQA", "head_dim"),
        (lambda size: GQA(8, num_heads=2, window=size), "GQA", "window"),
        (lambda size: SwiGLU(size), "SwiGLU", "dims"),
        (lambda size: GeGLU(8, hidden_dims=size), "GeGLU", "hidden_dims"),
        (lambda size: FeedForward(size), "FeedForward", "dims"),
        (lambda size: ShortConvolution(size, 3), "ShortConvolution", "dims"),
        (lambda size: ShortConvolution(8, size), "ShortConvolution", "kernel_size"),
        (lambda size: BitLinear(size, 8), "BitLinear", "input_dims"),
        (lambda size: BitLinear(8, size), "BitLinear", "output_dims"),
        (lambda size: RoPE(size), "RoPE", "dims"),
        (lambda size: LoRALinear(BitLinear(8, 8), rank=size), "LoRA", "rank"),
    ],
)
@pytest.mark.parametrize("size", [0, -4])
def test_sizes_below_one_are_refused_by_name(make: Any, place: str, name: str, size: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{place}\] '{name}' must be .*but got {size}\b"):
        make(size)


@pytest.mark.parametrize("size", [8.0, "8", True, mx.array(8)])
def test_sizes_are_integers(size: Any) -> None:
    for make in (MLGRU, GQA, SwiGLU, FeedForward):
        with pytest.raises(TypeError, match=r"'dims' must be a positive integer but got"):
            make(size)


def test_convolutions_of_negative_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[MLGRU\] 'conv_size' must be positive but got -1"):
        MLGRU(8, conv_size=-1)


@pytest.mark.parametrize("mixer", [MLGRU(8), GQA(8, num_heads=2)])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (1, 2, 5, 8)])
def test_mixers_take_three_axes(mixer: Any, shape: tuple[int, ...]) -> None:
    place = type(mixer).__name__
    expected = rf"\[{place}\] 'x' must have the three axes \(batch, length, dims\) but got shape"
    with pytest.raises(ValueError, match=expected) as refused:
        mixer(mx.zeros(shape))
    assert ("x[None]" in str(refused.value)) == (len(shape) == 2)
    with pytest.raises(ValueError, match=expected):
        mixer.residual(mx.zeros(shape), lambda x: x)
