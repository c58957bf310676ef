"""Attention with a window, alone and in a block of Mistral."""

import mlx.core as mx
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.models import Block
from mlx_mmfree.token_mixers import AttentionSink, SlidingWindowAttention
from tests.goldens.mixers.attention import LINEARS, check_op, rope_of
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


@golden("sliding_window__op")
def test_windows(file: GoldenFile) -> None:
    heads, window = file.inputs["k"].shape[1], file.hyper["window"]
    kind = SlidingWindowAttention
    check_op(kind, file, "causal_window", heads, window=window)
    # here a window counts the token itself
    check_op(kind, file, "symmetric_window", heads, window=window + 1, is_causal=False)
    sinks = {"window": window, "sinks": file.hyper["sinks"]}
    check_op(AttentionSink, file, "causal_window_2_sinks", heads, **sinks)


@golden("sliding_window__mistral_1layer")
@pytest.mark.parametrize("is_stepwise", [False, True])
def test_block_with_a_sliding_window(file: GoldenFile, is_stepwise: bool) -> None:
    hyper, dims = file.hyper, file.hyper["hidden"]
    mixer = SlidingWindowAttention(
        dims,
        window=hyper["window"],
        num_heads=hyper["heads"],
        num_kv_heads=hyper["kv_heads"],
        head_dim=hyper["head_dim"],
        rope=rope_of(hyper),
    )
    block = Block(dims, mixer, SwiGLU(dims, hidden_dims=hyper["ffn"]), norm_eps=hyper["rms_eps"])
    layer = "layers.0."
    attention = {ours: f"{layer}self_attn.{theirs}" for ours, theirs in LINEARS.items()}
    fill(block.token_mixer, file.weights, attention)
    linears = ("gate_proj", "up_proj", "down_proj")
    fill(block.channel_mixer, file.weights, {name: f"{layer}mlp.{name}" for name in linears})
    norms = {"token_norm": "input_layernorm", "channel_norm": "post_attention_layernorm"}
    fill(block, file.weights, {ours: layer + theirs for ours, theirs in norms.items()})
    x, state, parts = file.inputs["inputs_embeds"], None, []
    for part in mx.split(x, x.shape[1], axis=1) if is_stepwise else [x]:
        y, state = block(part, state)
        parts.append(y)
    y = mx.fast.rms_norm(
        mx.concatenate(parts, axis=1), file.weights["norm.weight"], hyper["rms_eps"]
    )
    assert_close(y, file.out["y"])
