"""Attention that sees few of a sequence holds no array of its length squared, forward and backward."""

import mlx.core as mx
import pytest

from mlx_mmfree.layers.attention.positions import ALiBi
from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.token_mixers import (
    AttentionSink,
    BigBird,
    Linformer,
    LocalAttention,
    Longformer,
    MultiHeadAttention,
    SlidingWindowAttention,
)

DIMS, SHORT, LONG = 8, 512, 4096
HEADS = {"num_heads": 2}
MIXERS: dict[str, TokenMixer] = {
    "window": SlidingWindowAttention(DIMS, window=16, **HEADS),
    "window on both sides": SlidingWindowAttention(DIMS, window=16, is_causal=False, **HEADS),
    "window with a bias": SlidingWindowAttention(DIMS, window=16, position_bias=ALiBi(2), **HEADS),
    "sinks": AttentionSink(DIMS, window=16, **HEADS),
    "learned sinks": AttentionSink(DIMS, window=16, is_learned=True, **HEADS),
    "blocks": LocalAttention(DIMS, block_size=16, **HEADS),
    "blocks on both sides": LocalAttention(DIMS, block_size=16, is_causal=False, **HEADS),
    "Longformer": Longformer(DIMS, window=16, **HEADS),
    "Big Bird": BigBird(DIMS, block_size=8, **HEADS),
    "Linformer": Linformer(DIMS, max_length=LONG, num_projected=16, **HEADS),
}


def _peak(mixer: TokenMixer, length: int, is_trained: bool) -> int:
    x = mx.random.normal((1, length, DIMS))
    mx.eval(x, mixer.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    if is_trained:
        mx.eval(mx.grad(lambda x: (mixer(x)[0] ** 2).sum())(x))
    else:
        mx.eval(mixer(x)[0])
    return mx.get_peak_memory() - before


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_memory_grows_with_the_length(name: str, is_trained: bool) -> None:
    short, long = (_peak(MIXERS[name], length, is_trained) for length in (SHORT, LONG))
    times = LONG / SHORT
    # between the length's growth and its square
    assert long < 3 * times * short


def test_the_measure_tells_squares() -> None:
    # a causal one is read in chunks, whose scores are not alive at once
    mixer = MultiHeadAttention(DIMS, position_bias=ALiBi(2), is_causal=False, **HEADS)
    assert _peak(mixer, 2048, False) > 3 * 8 * _peak(mixer, 256, False)
