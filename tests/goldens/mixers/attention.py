"""Shared parts of the tests of attention: mixers between queries, keys and values of a file."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention.mixer import SelfAttention
from tests.goldens.mixers.files import GoldenFile, assert_close, heads_apart, heads_together
from tests.goldens.mixers.passing import passing

LINEARS = {
    "query_proj": "q_proj",
    "key_proj": "k_proj",
    "value_proj": "v_proj",
    "output_proj": "o_proj",
}


def bare(
    kind: type[SelfAttention], heads: int, kv_heads: int, head_dim: int, **options: Any
) -> SelfAttention:
    """Attention whose projections pass on `[q | k | v]`, the heads side by side."""
    sizes = {"num_heads": heads, "head_dim": head_dim}
    if kv_heads != heads:
        sizes["num_kv_heads"] = kv_heads
    names = ("query_proj", "key_proj", "value_proj")
    widths = dict(
        zip(names, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), strict=True)
    )
    mixer = kind(sum(widths.values()), **sizes, **options)
    return passing(mixer, widths, heads * head_dim)


def run_op(
    kind: type[SelfAttention], q: mx.array, k: mx.array, v: mx.array, **options: Any
) -> mx.array:
    """The output of a mixer for queries, keys and values `(B, H, T, K)`."""
    heads, head_dim = q.shape[1], q.shape[-1]
    mixer = bare(kind, heads, k.shape[1], head_dim, **options)
    y, _ = mixer(mx.concatenate([heads_together(x) for x in (q, k, v)], axis=-1))
    return heads_apart(y[..., : heads * head_dim], heads)


def check_op(
    kind: type[SelfAttention], file: GoldenFile, output: str, kv_heads: int, **options: Any
) -> None:
    """The operation on `(B, H, T, K)` arrays."""
    q, k, v = (file.inputs[name] for name in "qkv")
    got = run_op(kind, q, k[:, :kv_heads], v[:, :kv_heads], **options)
    assert_close(got, file.out[output])


def rope_of(hyper: dict[str, Any]) -> RoPE:
    assert hyper.get("rope_layout", "half-split") == "half-split"
    return RoPE(hyper["head_dim"], base=hyper["rope_base"])


def fill_packed(mixer: nn.Module, weight: mx.array, bias: mx.array | None = None) -> None:
    """Gives a mixer projections that a file keeps in one matrix, one after the other."""
    for part, name in enumerate(("query_proj", "key_proj", "value_proj")):
        mixer[name].weight = mx.split(weight, 3)[part]
        if bias is not None:
            mixer[name].bias = mx.split(bias, 3)[part]
