"""Grouped-query attention, with windows, sinks and rotated positions."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import RoPE
from mlx_mmfree.models import Block
from mlx_mmfree.token_mixers import GQA, KeyValueCache
from tests.goldens.mixers.files import (
    GoldenFile,
    assert_close,
    fill,
    golden,
    heads_apart,
    heads_together,
)

LINEARS = {
    "query_proj": "q_proj",
    "key_proj": "k_proj",
    "value_proj": "v_proj",
    "output_proj": "o_proj",
}


def bare(heads: int, kv_heads: int, head_dim: int, **options: Any) -> GQA:
    """Attention whose projections pass on `[q | k | v]`, the heads side by side."""
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    mixer = GQA(sum(widths), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **options)
    starts = [0, widths[0], widths[0] + widths[1]]
    for name, start, width in zip(
        ("query_proj", "key_proj", "value_proj"), starts, widths, strict=True
    ):
        mixer[name].weight = mx.eye(sum(widths))[start : start + width]
    mixer.output_proj.weight = mx.eye(sum(widths))[:, : widths[0]]
    return mixer


def check_op(file: GoldenFile, output: str, kv_heads: int, **options: Any) -> None:
    """The operation on `(B, H, T, K)` arrays."""
    q, k, v = (file.inputs[name] for name in "qkv")
    heads, head_dim = q.shape[1], q.shape[-1]
    mixer = bare(heads, kv_heads, head_dim, **options)
    flat = [heads_together(x) for x in (q, k[:, :kv_heads], v[:, :kv_heads])]
    y, _ = mixer(mx.concatenate(flat, axis=-1))
    assert_close(heads_apart(y[..., : heads * head_dim], heads), file.out[output])


def rope_of(hyper: dict[str, Any]) -> RoPE:
    assert hyper.get("rope_layout", "half-split") == "half-split"
    return RoPE(hyper["head_dim"], base=hyper["rope_base"])


@golden("gqa__op")
def test_gqa_op(file: GoldenFile) -> None:
    kv_heads = file.hyper["kv_heads"]
    check_op(file, "causal", kv_heads)
    check_op(file, "full", kv_heads, is_causal=False)
    check_op(file, "mqa_causal", 1)


@golden("sliding_window__op")
def test_windows(file: GoldenFile) -> None:
    heads, window = file.inputs["k"].shape[1], file.hyper["window"]
    check_op(file, "causal_window", heads, cache=KeyValueCache(window))
    sinks = KeyValueCache(window, sinks=file.hyper["sinks"])
    check_op(file, "causal_window_2_sinks", heads, cache=sinks)
    # in GQA a window counts the token itself
    check_op(file, "symmetric_window", heads, cache=KeyValueCache(window + 1), is_causal=False)


@golden("gqa__llama_attention_rope")
def test_attention_with_rope(file: GoldenFile) -> None:
    hyper = file.hyper
    heads = {"num_heads": hyper["heads"], "num_kv_heads": hyper["kv_heads"]}
    mixer = GQA(hyper["hidden"], head_dim=hyper["head_dim"], rope=rope_of(hyper), **heads)
    fill(mixer, file.weights, LINEARS)
    assert_close(mixer(file.inputs["x"])[0], file.out["y"])


@golden("sliding_window__mistral_1layer")
@pytest.mark.parametrize("is_stepwise", [False, True])
def test_block_with_a_sliding_window(file: GoldenFile, is_stepwise: bool) -> None:
    hyper, dims = file.hyper, file.hyper["hidden"]
    heads = {"num_heads": hyper["heads"], "num_kv_heads": hyper["kv_heads"]}
    cache = KeyValueCache(hyper["window"])
    mixer = GQA(dims, head_dim=hyper["head_dim"], rope=rope_of(hyper), cache=cache, **heads)
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


@golden("attention_sink__streaming_llm_decode")
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_streaming_attention_sinks(file: GoldenFile, cut: int) -> None:
    """Read in pieces; the reference reads token by token, which gives the same."""
    hyper = file.hyper
    cache = KeyValueCache(hyper["recent_size"], sinks=hyper["start_size"])
    heads = {"num_heads": hyper["heads"], "num_kv_heads": hyper["kv_heads"]}
    mixer = GQA(
        hyper["hidden"], head_dim=hyper["head_dim"], rope=rope_of(hyper), cache=cache, **heads
    )
    fill(mixer, file.weights, LINEARS)
    x, state, parts = file.inputs["x"], None, []
    for start in range(0, x.shape[1], cut):
        y, state = mixer(x[:, start : start + cut], state)
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1), file.out["y"])
