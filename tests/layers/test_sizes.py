"""Sizes that no layer can have are named, with the layer, before anything is made of them."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import FeedForward, GeGLU, ReGLU, SquaredReLUGLU, SwiGLU
from mlx_mmfree.layers import (
    BitLinear,
    DynamicRoPE,
    PackedBitLinear,
    PackedLinear,
    RoPE,
    ShortConvolution,
)
from mlx_mmfree.layers.lora import DoRALinear, LoRAEmbedding, LoRALinear
from mlx_mmfree.layers.quantization import Quantization
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.token_mixers import (
    GQA,
    MLGRU,
    AttentionSink,
    KeyValueCache,
    LocalAttention,
    SlidingWindowAttention,
)

LINEAR = nn.Linear(4, 4)
NO_SIZES = [2.5, 8.0, float("nan"), 0, -1, True, "8", mx.array(8)]

SIZES: dict[str, Callable[[Any], object]] = {
    "[BitLinear] 'input_dims'": lambda size: BitLinear(size, 4),
    "[BitLinear] 'output_dims'": lambda size: BitLinear(4, size),
    "[BitLinear] 'input_dims' ": lambda size: PackedBitLinear(size, 4),
    "[PackedLinear] 'input_dims'": lambda size: PackedLinear(size, 4),
    "[PackedLinear] 'output_dims'": lambda size: PackedLinear(4, size),
    "[RoPE] 'dims'": RoPE,
    "[DynamicRoPE] 'trained_length'": lambda n: DynamicRoPE(8, factor=2.0, trained_length=n),
    "[ShortConvolution] 'dims'": lambda size: ShortConvolution(size, 4),
    "[ShortConvolution] 'kernel_size'": lambda size: ShortConvolution(4, size),
    "[LoRA] 'rank'": lambda rank: LoRALinear(LINEAR, rank=rank),
    "[LoRA] 'rank' ": lambda rank: DoRALinear(LINEAR, rank=rank),
    "[LoRA] 'rank'  ": lambda rank: LoRAEmbedding(nn.Embedding(4, 4), rank=rank),
    "[Block] 'dims'": lambda dims: Block(dims, MLGRU(4), SwiGLU(4)),
    "[SwiGLU] 'dims'": SwiGLU,
    "[GeGLU] 'dims'": GeGLU,
    "[ReGLU] 'dims'": ReGLU,
    "[SquaredReLUGLU] 'dims'": SquaredReLUGLU,
    "[SwiGLU] 'hidden_dims'": lambda dims: SwiGLU(8, hidden_dims=dims),
    "[FeedForward] 'dims'": FeedForward,
    "[FeedForward] 'hidden_dims'": lambda dims: FeedForward(8, hidden_dims=dims),
    "[MLGRU] 'dims'": MLGRU,
    "[MLGRU] 'hidden_dims'": lambda dims: MLGRU(8, hidden_dims=dims),
    "[GQA] 'dims'": GQA,
    "[GQA] 'num_heads'": lambda heads: GQA(8, num_heads=heads),
    "[GQA] 'num_kv_heads'": lambda heads: GQA(8, num_heads=2, num_kv_heads=heads),
    "[GQA] 'head_dim'": lambda dims: GQA(8, num_heads=2, head_dim=dims),
    "[KeyValueCache] 'window'": lambda window: KeyValueCache(window=window),
    "[SlidingWindowAttention] 'window'": lambda window: SlidingWindowAttention(8, window=window),
    "[AttentionSink] 'window'": lambda window: AttentionSink(8, window=window),
    "[GQA] 'max_size'": lambda size: GQA(8, num_heads=2).with_state(max_size=size),
    "[LocalAttention] 'max_size'": lambda size: LocalAttention(8).with_state(max_size=size),
}

COUNTS: dict[str, Callable[[Any], object]] = {
    "[MLGRU] 'conv_size'": lambda size: MLGRU(8, conv_size=size),
    "[AttentionSink] 'sinks'": lambda sinks: AttentionSink(8, sinks=sinks),
    "[KeyValueCache] 'sinks'": lambda sinks: KeyValueCache(window=9, sinks=sinks),
    "[KeyValueCache] 'quantization_start'": lambda n: KeyValueCache(quantization_start=n),
}


def refusal(make: Callable[[Any], object], value: object) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    assert caught.type is (ValueError if is_integer else TypeError)
    return str(caught.value)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_a_positive_integer(name: str) -> None:
    for value in NO_SIZES:
        assert refusal(SIZES[name], value).startswith(
            f"{name.rstrip()} must be positive but got {value}"
            if type(value) is int
            else f"{name.rstrip()} must be a positive integer but got {value!r}"
        )


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_an_integer_from_0(name: str) -> None:
    for value in NO_SIZES:
        if type(value) is int and value == 0:
            continue
        assert refusal(COUNTS[name], value).startswith(
            f"{name} must not be negative but got {value}"
            if type(value) is int
            else f"{name} must be an integer from 0 but got {value!r}"
        )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in SIZES
        if name.split("'")[1]
        not in ("hidden_dims", "num_kv_heads", "head_dim", "window", "max_size")
    ],
)
def test_only_sizes_with_a_default_may_be_none(name: str) -> None:
    assert refusal(SIZES[name], None) == f"{name.rstrip()} must be a positive integer but got None."


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_base_is_a_positive_number(value: float) -> None:
    with pytest.raises(ValueError, match=r"^\[RoPE\] 'base' must be a positive number but got"):
        RoPE(8, base=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_are_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"^\[LoRA\] 'scale' must be finite but got"):
        LoRALinear(LINEAR, scale=value)
    with pytest.raises(ValueError, match=r"^\[DynamicRoPE\] 'factor' must be a number from 1"):
        DynamicRoPE(8, factor=value, trained_length=4)


@pytest.mark.parametrize("value", [8.0, 7, True])
def test_bits_are_those_of_mlx(value: float) -> None:
    with pytest.raises(ValueError, match=r"^\[Quantization\] 'bits' must be one of"):
        Quantization(value)  # type: ignore[arg-type]


def test_sinks_need_a_window() -> None:
    for make, caller in (
        (lambda: AttentionSink(8, window=None, sinks=4), "AttentionSink"),
        (lambda: KeyValueCache(sinks=4), "KeyValueCache"),
    ):
        with pytest.raises(
            ValueError, match=rf"^\[{caller}\] 'sinks' must be 0.* 'window',.*got 4\.$"
        ):
            make()
