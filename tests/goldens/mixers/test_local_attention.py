"""Attention in blocks, and with the exact windows of the same package."""

from mlx_mmfree.layers import RoPE
from mlx_mmfree.token_mixers import LocalAttention, SlidingWindowAttention
from tests.goldens.mixers.attention import check_op
from tests.goldens.mixers.files import GoldenFile, golden


@golden("local_attention__blocked")
def test_blocks(file: GoldenFile) -> None:
    heads, window = file.inputs["k"].shape[1], file.hyper["window"]
    rope = RoPE(file.inputs["q"].shape[-1])
    for output, options in {
        "causal_back1": {},
        "causal_back1_rotary": {"rope": rope},
        "noncausal_1_1": {"is_causal": False},
        "block_only": {"is_causal": False, "neighbours": 0},
        "causal_block_only": {"neighbours": 0},
    }.items():
        check_op(LocalAttention, file, output, heads, block_size=window, **options)


@golden("local_attention__blocked")
def test_exact_windows(file: GoldenFile) -> None:
    heads, window = file.inputs["k"].shape[1], file.hyper["window"] + 1
    kind = SlidingWindowAttention
    check_op(kind, file, "causal_exact_window", heads, window=window)
    check_op(kind, file, "noncausal_exact_window", heads, window=window, is_causal=False)
