"""Mixers against reference implementations, by the files of `tests/data/mixers`."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import RoPE
from mlx_mmfree.models import Block
from mlx_mmfree.token_mixers import GQA, KeyValueCache
from tests.tolerances import TOLERANCE, relative_error

FOLDER = Path(__file__).parents[1] / "data" / "mixers"
FLOAT32 = TOLERANCE[mx.float32]
LINEARS = {
    "query_proj": "q_proj",
    "key_proj": "k_proj",
    "value_proj": "v_proj",
    "output_proj": "o_proj",
}
Tensors = dict[str, mx.array]


def golden(name: str) -> Tensors:
    return mx.load(str(FOLDER / f"{name}.safetensors"))


def fill(module: nn.Module, tensors: Tensors, prefix: str, names: dict[str, str]) -> None:
    for ours, theirs in names.items():
        module[ours].weight = tensors[f"{prefix}{theirs}.weight"]


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


def attend(mixer: GQA, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """The op on `(B, H, L, K)` arrays."""
    batch, heads, length, head_dim = q.shape
    flat = [x.swapaxes(1, 2).reshape(batch, length, -1) for x in (q, k, v)]
    y, _ = mixer(mx.concatenate(flat, axis=-1))
    return y[..., : heads * head_dim].reshape(batch, length, heads, head_dim).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("case", "output", "kv_heads", "options"),
    [
        ("gqa__op", "causal", 2, {}),
        ("gqa__op", "full", 2, {"is_causal": False}),
        ("gqa__op", "mqa_causal", 1, {}),
        ("sliding_window__op", "causal_window", 2, {"cache": KeyValueCache(window=3)}),
        (
            "sliding_window__op",
            "causal_window_2_sinks",
            2,
            {"cache": KeyValueCache(window=3, sinks=2)},
        ),
        (
            "sliding_window__op",
            "symmetric_window",
            2,
            {"cache": KeyValueCache(window=4), "is_causal": False},
        ),
    ],
)
def test_attention(case: str, output: str, kv_heads: int, options: dict[str, Any]) -> None:
    tensors = golden(case)
    q, k, v = tensors["in.q"], tensors["in.k"][:, :kv_heads], tensors["in.v"][:, :kv_heads]
    mixer = bare(q.shape[1], kv_heads, q.shape[-1], **options)
    assert relative_error(attend(mixer, q, k, v), tensors[f"out.{output}"]) <= FLOAT32


def test_attention_with_rope() -> None:
    tensors = golden("gqa__llama_attention_rope")
    mixer = GQA(16, num_heads=4, num_kv_heads=2, rope=RoPE(4))
    fill(mixer, tensors, "w.", LINEARS)
    assert relative_error(mixer(tensors["in.x"])[0], tensors["out.y"]) <= FLOAT32


@pytest.mark.parametrize("is_stepwise", [False, True])
def test_block_with_a_sliding_window(is_stepwise: bool) -> None:
    tensors = golden("sliding_window__mistral_1layer")
    mixer = GQA(16, num_heads=4, num_kv_heads=2, rope=RoPE(4), cache=KeyValueCache(window=3))
    block = Block(16, mixer, SwiGLU(16, hidden_dims=24), norm_eps=1e-6)
    fill(block.token_mixer, tensors, "w.layers.0.self_attn.", LINEARS)
    channels = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
    fill(block.channel_mixer, tensors, "w.layers.0.mlp.", channels)
    block.token_norm.weight = tensors["w.layers.0.input_layernorm.weight"]
    block.channel_norm.weight = tensors["w.layers.0.post_attention_layernorm.weight"]
    x, state, parts = tensors["in.inputs_embeds"], None, []
    for part in mx.split(x, x.shape[1], axis=1) if is_stepwise else [x]:
        y, state = block(part, state)
        parts.append(y)
    y = mx.fast.rms_norm(mx.concatenate(parts, axis=1), tensors["w.norm.weight"], 1e-6)
    assert relative_error(y, tensors["out.y"]) <= FLOAT32


@pytest.mark.parametrize("cuts", [list(range(1, 12)), [], [3, 8]], ids=str)
def test_attention_sinks(cuts: list[int]) -> None:
    tensors = golden("attention_sink__streaming_llm_decode")
    mixer = GQA(12, num_heads=2, rope=RoPE(6), cache=KeyValueCache(window=4, sinks=2))
    fill(mixer, tensors, "w.", LINEARS)
    state, parts = None, []
    for part in mx.split(tensors["in.x"], cuts, axis=1):
        y, state = mixer(part, state)
        parts.append(y)
    assert relative_error(mx.concatenate(parts, axis=1), tensors["out.y"]) <= FLOAT32


@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_rope(layout: str) -> None:
    tensors = golden("rope__both_layouts")
    rope = RoPE(8, is_interleaved=layout == "interleaved")
    assert tensors["in.positions"].tolist() == list(range(6))
    assert relative_error(rope(tensors["in.q"]), tensors[f"out.q_{layout}"]) <= FLOAT32


def test_swiglu() -> None:
    tensors = golden("swiglu__llama_mlp")
    mixer = SwiGLU(16, hidden_dims=24)
    fill(mixer, tensors, "w.", {name: name for name in ("gate_proj", "up_proj", "down_proj")})
    assert relative_error(mixer(tensors["in.x"]), tensors["out.y"]) <= FLOAT32
