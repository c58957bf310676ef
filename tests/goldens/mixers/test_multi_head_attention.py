"""Scaled dot-product attention and multi-head attention, to itself and to a memory."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mmfree.ops import attention
from mlx_mmfree.token_mixers import MultiHeadAttention
from tests.goldens.mixers.attention import fill_packed
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


@golden("sdpa__basic")
def test_scaled_dot_product_attention(file: GoldenFile) -> None:
    q, k, v = (file.inputs[name] for name in "qkv")
    length, head_dim = q.shape[2:]
    assert_close(attention(q, k, v), file.out["plain"])
    # the operation divides by the root of the head's dims
    assert_close(attention(q * (0.3 * head_dim**0.5), k, v), file.out["scale_0p3"])
    assert_close(attention(q, k[:, :, :length], v[:, :, :length], "causal"), file.out["causal_sq"])
    assert_close(attention(q, k, v, file.inputs["bool_mask"]), file.out["bool_mask"])
    assert_close(attention(q, k, v, bias=file.inputs["float_bias"]), file.out["float_bias"])


def _mixer(file: GoldenFile, **options: Any) -> MultiHeadAttention:
    hyper = file.hyper
    mixer = MultiHeadAttention(
        hyper["embed_dim"], num_heads=hyper["num_heads"], bias=hyper["bias"], **options
    )
    fill(mixer, file.weights, {"output_proj": "out_proj"})
    return mixer


@golden("mha__self")
def test_self_attention(file: GoldenFile) -> None:
    x = file.inputs["x"]
    own = file.weights["in_proj_weight"], file.weights.get("in_proj_bias")
    causal, whole = _mixer(file), _mixer(file, is_causal=False)
    for mixer in (causal, whole):
        fill_packed(mixer, *own)
    assert_close(causal(x)[0], file.out["causal"])
    assert_close(whole(x)[0], file.out["self"])
    assert_close(whole(x, memory=x)[0], file.out["self"])
    # torch's mask is true where a key is left out; its padded queries look at the others too
    valid = mx.logical_not(file.inputs["key_padding_mask"])
    y, _ = whole(x, memory=x, memory_valid=valid)
    assert_close(y, file.out["key_padding"])
    seen = valid[..., None]
    alone = mx.where(seen, whole(x, None, valid)[0], 0.0)
    assert_close(alone, mx.where(seen, file.out["key_padding"], 0.0))


class _Columns(nn.Module):
    """A projection to columns of the identity, the same for every head, whatever its input."""

    def __init__(self, columns: mx.array, heads: int):
        super().__init__()
        self._values = mx.tile(columns, (1, heads))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.broadcast_to(self._values, (*x.shape[:2], self._values.shape[1]))


@golden("mha__self")
def test_weights_of_self_attention(file: GoldenFile) -> None:
    x, mixer = file.inputs["x"], _mixer(file, is_causal=False)
    heads, head_dim, count = mixer.num_heads, mixer.head_dim, x.shape[1]
    fill_packed(mixer, file.weights["in_proj_weight"], file.weights.get("in_proj_bias"))
    mixer.output_proj = nn.Identity()
    identity = np.pad(np.eye(count, dtype=np.float32), [(0, 0), (0, -count % head_dim)])
    parts = []
    for columns in np.split(identity, identity.shape[1] // head_dim, axis=1):
        mixer.value_proj = _Columns(mx.array(columns), heads)
        parts.append(mx.unflatten(mixer(x)[0], -1, (heads, head_dim)).swapaxes(1, 2))
    weights = mx.concatenate(parts, axis=-1)[..., :count]
    assert_close(weights, file.out["self_attn_weights"])


@golden("mha__cross")
def test_cross_attention(file: GoldenFile) -> None:
    mixer = _mixer(file, memory_dims=(file.hyper["kdim"], file.hyper["vdim"]))
    names = {"query_proj": "q", "key_proj": "k", "value_proj": "v"}
    for part, (ours, theirs) in enumerate(names.items()):
        mixer[ours].weight = file.weights[f"{theirs}_proj_weight"]
        if file.hyper["bias"]:
            mixer[ours].bias = mx.split(file.weights["in_proj_bias"], 3)[part]
    memory = (file.inputs["key"], file.inputs["value"])
    x = file.inputs["query"]
    y, state = mixer(x, memory=memory)
    assert_close(y, file.out["y"])
    # what was made of the memory serves later calls
    parts = [mixer(x[:, n : n + 1], state)[0] for n in range(x.shape[1])]
    assert_close(mx.concatenate(parts, axis=1), file.out["y"])
