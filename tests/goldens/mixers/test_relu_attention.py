"""Attention by ReLU, plain and with gated norms."""

from typing import Any

import mlx.core as mx

from mlx_mmfree.token_mixers import ReLUAttention
from tests.goldens.mixers.attention import fill_packed
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


def _mixer(file: GoldenFile, **options: Any) -> ReLUAttention:
    hyper = file.hyper
    heads = {"num_heads": hyper["heads"], "head_dim": hyper["dim_head"]}
    mixer = ReLUAttention(hyper["dim"], output_bias=True, **heads, **options)
    fill_packed(mixer, file.weights["to_qkv.weight"])
    fill(mixer, file.weights, {"output_proj": "to_out.0"})
    return mixer


@golden("relu_attention__plain")
def test_plain(file: GoldenFile) -> None:
    x, none = file.inputs["x"], {"normalization": "none"}
    assert_close(_mixer(file, is_causal=False, **none)(x)[0], file.out["relu"])
    assert_close(_mixer(file, is_causal=False)(x)[0], file.out["relu_div_len"])
    assert_close(_mixer(file, is_causal=False, power=2)(x)[0], file.out["relu2_div_len"])
    mixer, state, parts = _mixer(file, **none), None, []
    assert_close(mixer(x)[0], file.out["relu_causal"])
    for part in mx.split(x, x.shape[1], axis=1):
        y, state = mixer(part, state)
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1), file.out["relu_causal"])


@golden("relu_attention__rela_causal", "relu_attention__rela_noncausal")
def test_rela(file: GoldenFile) -> None:
    hyper = file.hyper
    options = {"norm_eps": hyper["eps"], "is_causal": hyper["causal"]}
    mixer = _mixer(file, normalization="gated_norm", **options)
    for ours, theirs in (("input_norm", "norm"), ("head_norm", "norm_values")):
        mixer[ours].weight = file.weights[f"{theirs}.g"]
        mixer[ours].gate = file.weights[f"{theirs}.w"]
    assert_close(mixer(file.inputs["x"])[0], file.out["y"])
