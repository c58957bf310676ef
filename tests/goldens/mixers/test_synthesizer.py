"""Synthesized attention in all its formats."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.token_mixers import Synthesizer
from tests.goldens.mixers.files import (
    GoldenFile,
    assert_close,
    fill,
    golden,
    heads_apart,
    heads_together,
)
from tests.goldens.mixers.passing import passing


def _weigh(
    scores: str, q: mx.array, v: mx.array, is_causal: bool, tables: dict[str, Any], **options: Any
) -> mx.array:
    """The output of a mixer for queries and values `(B, H, T, K)`; `tables` are its weights."""
    heads = v.shape[1]
    widths = {"value_proj": heads * v.shape[-1]}
    if scores == "dense":
        widths = {"query_proj": heads * q.shape[-1]} | widths
    mixer = Synthesizer(
        sum(widths.values()),
        scores=scores,
        num_heads=heads,
        head_dim=q.shape[-1],
        value_head_dim=v.shape[-1],
        is_causal=is_causal,
        **options,
    )
    passing(mixer, widths, widths["value_proj"])
    for name, value in tables.items():
        if isinstance(value, tuple):
            mixer[name].weight, mixer[name].bias = value
        else:
            mixer[name] = value
    parts = [heads_together(part) for part in ((q, v) if scores == "dense" else (v,))]
    y = mixer(mx.concatenate(parts, axis=-1))[0][..., : widths["value_proj"]]
    return heads_apart(y, heads)


@golden("synthesizer__dense", "synthesizer__random")
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_scores(file: GoldenFile, is_causal: bool) -> None:
    v, weights = file.inputs["v"], file.weights
    options: dict[str, Any] = {"max_length": file.hyper["max_len"]}
    if "random_attn" in weights:
        scores, q, tables = "random", v, {"table": weights["random_attn"]}
    else:
        scores, q = "dense", file.inputs["q"]
        options["score_dims"] = file.hyper["d_hid"]
        tables = {
            ours: (weights[f"{theirs}.weight"], weights[f"{theirs}.bias"])
            for ours, theirs in (("score_up_proj", "w_1"), ("score_proj", "w_2"))
        }
    got = _weigh(scores, q, v, is_causal, tables, **options)
    assert_close(got, file.out["y_causal" if is_causal else "y"])
    if not is_causal:
        # values that are unit vectors show the weights
        unit = mx.broadcast_to(mx.eye(v.shape[2]), (*v.shape[:3], v.shape[2]))
        assert_close(_weigh(scores, q, unit, False, tables, **options), file.out["weights"])


@golden("synthesizer__factorized_dense")
def test_factors_repeated_one_by_one(file: GoldenFile) -> None:
    hyper = file.hyper
    mixer = Synthesizer(
        hyper["dim"],
        max_length=hyper["max_len"],
        scores="factorized_dense",
        score_dims=hyper["a"],
        tiling="each",
        num_heads=hyper["heads"],
        bias=True,
        is_causal=False,
    )
    names = {"first_proj": "f_a", "second_proj": "f_b", "value_proj": "v", "output_proj": "proj"}
    fill(mixer, file.weights, names)
    assert_close(mixer(file.inputs["x"])[0], file.out["y"])


@golden("synthesizer__factorized_dense_tiled")
def test_factors_repeated_as_a_whole(file: GoldenFile) -> None:
    hyper = file.hyper
    mixer = _single(file, scores="factorized_dense", score_dims=hyper["a"], tiling="whole")
    fill(mixer, file.weights, {"first_proj": "a_proj", "second_proj": "b_proj"})
    _check_single(mixer, file)


@golden("synthesizer__factorized_random")
def test_factorized_matrix(file: GoldenFile) -> None:
    hyper, weights = file.hyper, file.weights
    mixer = Synthesizer(
        hyper["dim"],
        max_length=hyper["max_len"],
        scores="factorized_random",
        score_dims=hyper["k"],
        num_heads=hyper["heads"],
        output_bias=True,
        is_causal=False,
    )
    fill(mixer, weights, {"value_proj": "v", "output_proj": "proj"})
    mixer.left_table, mixer.right_table = weights["random_attn_1"], weights["random_attn_2"]
    assert_close(mixer(file.inputs["x"])[0], file.out["y"])


@golden("synthesizer__mixture_random_vanilla")
def test_mixture_with_products(file: GoldenFile) -> None:
    mixer = _single(file, scores="random", has_products=True, score_scale=1.0)
    fill(mixer, file.weights, {"query_proj": "query_fc", "key_proj": "key_fc"})
    mixer.table = file.weights["attention"]
    _check_single(mixer, file)


def _single(file: GoldenFile, **options: Any) -> Synthesizer:
    """One of a single head without a projection of the output."""
    hyper = file.hyper
    sizes = {"max_length": hyper["seq_len"], "num_heads": 1, "is_causal": False}
    return Synthesizer(hyper["dim"], bias=True, output_bias=False, **sizes, **options)


def _check_single(mixer: Synthesizer, file: GoldenFile) -> None:
    x, value = file.inputs["x"], mixer.value_proj
    mixer.output_proj.weight = mx.eye(x.shape[-1])
    fill(mixer, file.weights, {"value_proj": "value_fc"})
    assert_close(mixer(x)[0], file.out["y"])
    # the same weights of unit vectors, a token at a time, are the columns of the matrix
    columns = []
    for token in range(x.shape[1]):
        bias = mx.zeros_like(value.bias)
        mixer.value_proj = _Unit(token, bias.shape[0])
        columns.append(mixer(x)[0][..., 0])
    assert_close(mx.stack(columns, axis=-1), file.out["weights"])


class _Unit(nn.Module):
    """In place of a projection: ones for one token, zeros for the others."""

    def __init__(self, token: int, dims: int):
        super().__init__()
        self._token, self._dims = token, dims

    def __call__(self, x: mx.array) -> mx.array:
        is_token = (mx.arange(x.shape[1]) == self._token)[None, :, None]
        return mx.broadcast_to(is_token.astype(x.dtype), (*x.shape[:2], self._dims))
