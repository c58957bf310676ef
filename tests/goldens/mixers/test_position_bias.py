"""Biases of the scores by distance: ALiBi and T5's buckets."""

import mlx.core as mx

from mlx_mmfree.layers.attention.positions import ALiBi, RelativeBias
from mlx_mmfree.token_mixers import MultiHeadAttention
from tests.goldens.mixers.files import GoldenFile, assert_close, golden


def relative(length: int) -> mx.array:
    token = mx.arange(length)
    return (token - token[:, None])[None]


@golden("alibi__bloom")
def test_alibi(file: GoldenFile) -> None:
    dims, heads = file.hyper["dims"], file.hyper["heads"]
    x, weights = file.inputs["x"], file.weights
    bias = ALiBi(heads)
    # BLOOM counts from the first key, which changes no weight of a row
    last = bias(relative(x.shape[1]))[0, :, -1:]
    assert_close(last - last[..., :1], file.out["bias"])
    mixer = MultiHeadAttention(dims, num_heads=heads, bias=True, position_bias=bias)
    # the rows of a head: queries, keys, values
    packed = {
        kind: mx.unflatten(weights[f"query_key_value.{kind}"], 0, (heads, 3, -1))
        for kind in ("weight", "bias")
    }
    for part, name in enumerate(("query_proj", "key_proj", "value_proj")):
        for kind, array in packed.items():
            mixer[name][kind] = mx.flatten(array[:, part], 0, 1)
    mixer.output_proj.weight = weights["dense.weight"]
    mixer.output_proj.bias = weights["dense.bias"]
    assert_close(mixer(x)[0], file.out["y"])
    state, parts = None, []
    for part in mx.split(x, [1, 2, 9], axis=1):
        y, state = mixer(part, state)
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1), file.out["y"])


@golden("relative_bias__t5")
def test_relative_bias(file: GoldenFile) -> None:
    hyper, x = file.hyper, file.inputs["x"]
    for is_causal, kind in ((True, "causal"), (False, "bidirectional")):
        bias = RelativeBias(
            hyper["num_heads"],
            num_buckets=hyper["relative_attention_num_buckets"],
            max_distance=hyper["relative_attention_max_distance"],
            is_causal=is_causal,
        )
        bias.weight = file.weights["relative_attention_bias.weight"]
        assert_close(bias(relative(x.shape[1])), file.out[f"bias_{kind}"])
        mixer = MultiHeadAttention(
            hyper["d_model"],
            num_heads=hyper["num_heads"],
            head_dim=hyper["head_dim"],
            position_bias=bias,
            is_causal=is_causal,
        )
        names = {"query_proj": "q", "key_proj": "k", "value_proj": "v", "output_proj": "o"}
        for ours, theirs in names.items():
            mixer[ours].weight = file.weights[f"{theirs}.weight"]
        # T5 does not divide scores by the root of the head's dims
        mixer.query_proj.weight = mixer.query_proj.weight * (
            hyper["scale"] * hyper["head_dim"] ** 0.5
        )
        assert_close(mixer(x)[0], file.out[f"y_{kind}"])
