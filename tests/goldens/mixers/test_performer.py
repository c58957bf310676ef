"""FAVOR+ attention."""

from typing import Any

import mlx.core as mx

from mlx_mmfree.token_mixers import Performer
from mlx_mmfree.token_mixers.performer import exponents, softmax_features
from tests.goldens.mixers.files import GoldenFile, assert_close, golden, heads_apart, heads_together


def attend(file: GoldenFile, **options: Any) -> mx.array:
    """The result for the file's queries, keys and values, which projections pass on."""
    q = file.inputs["q"]
    _, heads, _, head_dim = q.shape
    width, projection = heads * head_dim, file.weights["projection_matrix"]
    # heads for the queries, as many for the keys and for the values: only the first ones count
    mixer = Performer(3 * width, num_heads=3 * heads, num_features=projection.shape[0], **options)
    mixer.projection_matrix = projection
    for n, name in enumerate(("query_proj", "key_proj", "value_proj")):
        mixer[name].weight = mx.roll(mx.eye(3 * width), n * width, axis=1)
    mixer.output_proj.weight = mx.eye(3 * width)
    x = mx.concatenate([heads_together(file.inputs[name]) for name in "qkv"], axis=-1)
    return heads_apart(mixer(x)[0][..., :width], heads)


@golden("performer__favor_plus")
def test_features(file: GoldenFile) -> None:
    eps, projection = file.hyper["eps_softmax"], file.weights["projection_matrix"]
    for name, axes in (("q", (-1,)), ("k", (-2, -1))):
        projected, half = exponents(file.inputs[name], projection)
        largest = projected.max(axis=axes, keepdims=True)
        features = softmax_features(projected, half, largest, eps)
        assert_close(features, file.out[f"phi_{name}"])


@golden("performer__favor_plus")
def test_attention(file: GoldenFile) -> None:
    eps = file.hyper["eps_softmax"]
    released = {"eps": eps, "key_maximum": "call"}
    assert_close(attend(file, is_causal=False, **released), file.out["softmax_noncausal"])
    assert_close(attend(file, **released), file.out["softmax_causal"])
    relu = {"kernel": "relu", "eps": file.hyper["eps_relu"]}
    assert_close(attend(file, is_causal=False, **relu), file.out["relu_noncausal"])
