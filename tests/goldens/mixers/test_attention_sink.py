"""Attention sinks: first tokens that stay in the cache, and learned logits."""

import mlx.core as mx
import pytest

from mlx_mmfree.token_mixers import AttentionSink
from tests.goldens.mixers.attention import LINEARS, bare, rope_of
from tests.goldens.mixers.files import (
    GoldenFile,
    assert_close,
    fill,
    golden,
    heads_apart,
    heads_together,
)


@golden("attention_sink__streaming_llm_decode")
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_streaming_attention_sinks(file: GoldenFile, cut: int) -> None:
    """Read in chunks; the reference reads token by token, which gives the same."""
    hyper = file.hyper
    rope = rope_of(hyper)
    mixer = AttentionSink(
        hyper["hidden"],
        window=hyper["recent_size"],
        sinks=hyper["start_size"],
        num_heads=hyper["heads"],
        num_kv_heads=hyper["kv_heads"],
        head_dim=hyper["head_dim"],
        rope=rope,
    )
    fill(mixer, file.weights, LINEARS)
    x, state, parts, lengths = file.inputs["x"], None, [], []
    for start in range(0, x.shape[1], cut):
        y, state = mixer(x[:, start : start + cut], state)
        parts.append(y)
        lengths.append(state.used)
    assert_close(mx.concatenate(parts, axis=1), file.out["y"])
    counts = file.out["cache_len"].tolist()
    assert lengths == [
        counts[min(n, len(counts)) - 1] for n in range(cut, cut * len(lengths) + 1, cut)
    ]
    # the reference keeps tokens in their order and rotates keys when they are read
    order = mx.argsort(state.positions, axis=1)
    keys, values = (
        mx.take_along_axis(buffer[:, :, : state.used], order[:, None, :, None], axis=2)
        for buffer in (state.keys, state.values)
    )
    assert_close(values, file.out["v_cache_last"])
    positions = mx.take_along_axis(state.positions, order, axis=1)
    assert_close(keys, rope(file.out["k_cache_last"], offset=positions))


@golden("attention_sink__learned_logit")
def test_learned_logits(file: GoldenFile) -> None:
    q, k, v = (file.inputs[name] for name in "qkv")
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    options = {"window": None, "sinks": 0, "is_learned": True}
    mixer = bare(AttentionSink, heads, kv_heads, head_dim, **options)
    mixer.sink_logits = file.weights["sinks"]

    def run(v: mx.array) -> mx.array:
        y, _ = mixer(mx.concatenate([heads_together(x) for x in (q, k, v)], axis=-1))
        return heads_apart(y[..., : heads * head_dim], heads)

    assert_close(run(v), file.out["y"])
    # values that are columns of the identity give the weights
    count = k.shape[2]
    identity = mx.pad(mx.eye(count), [(0, 0), (0, -count % head_dim)])
    columns = mx.split(identity, identity.shape[1] // head_dim, axis=1)
    weights = mx.concatenate([run(mx.broadcast_to(part, v.shape)) for part in columns], axis=-1)
    assert_close(weights[..., :count], file.out["weights"])
