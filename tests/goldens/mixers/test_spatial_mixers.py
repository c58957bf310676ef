"""Spatial mixers against the code that they were published with."""

from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.models.swin import PatchMerging
from mlx_mmfree.spatial_mixers import (
    AdditiveAttention,
    ConvolutionalModulation,
    CrossCovarianceAttention,
    MultiScaleAttention,
    SpatialPooling,
    WindowAttention,
)
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden

Weights = dict[str, mx.array]
QKV = ("query_proj", "key_proj", "value_proj")


def channels_last(x: mx.array) -> mx.array:
    """`(B, C, H, W)` as `(B, H, W, C)`; weights of convolutions likewise."""
    return mx.moveaxis(x, 1, -1)


def as_map(tokens: mx.array) -> mx.array:
    """`(B, N, C)` as a map of one column."""
    return tokens[:, :, None]


def part(weights: Weights, prefix: str) -> Weights:
    return {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }


def as_linears(weights: Weights) -> Weights:
    """Weights of 1 x 1 convolutions as weights of linears."""
    return {
        name: value[:, :, 0, 0] if value.ndim == 4 and value.shape[1] > 1 else value
        for name, value in weights.items()
    }


def fill_depthwise(module: nn.Module, weights: Weights, name: str) -> None:
    module.weight = channels_last(weights[f"{name}.weight"])
    if f"{name}.bias" in weights:
        module.bias = weights[f"{name}.bias"]


def fill_norm(norm: nn.Module, weights: Weights, name: str) -> None:
    for parameter in ("weight", "bias", "running_mean", "running_var"):
        if f"{name}.{parameter}" in weights:
            norm[parameter] = weights[f"{name}.{parameter}"]


def fill_stacked(mixer: nn.Module, weights: Weights) -> None:
    """Query, key and value from one matrix."""
    for parameter in ("weight", "bias"):
        thirds = cast("list[mx.array]", mx.split(weights[f"qkv.{parameter}"], 3))
        for name, value in zip(QKV, thirds, strict=True):
            mixer[name][parameter] = value
    fill(mixer, weights, {"output_proj": "proj"})


def layer_norm(x: mx.array, weights: Weights, name: str, eps: float) -> mx.array:
    return mx.fast.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def feed_forward(weights: Weights) -> FeedForward:
    hidden, dims = weights["fc1.weight"].shape
    made = FeedForward(dims, hidden_dims=hidden, activation="gelu")
    fill(made, weights, {"up_proj": "fc1", "down_proj": "fc2"})
    return made


@golden("swin__window_attention")
def test_window_attention(file: GoldenFile) -> None:
    (side, wide), heads = file.hyper["window"], file.hyper["heads"]
    if side != wide:
        pytest.skip("windows are squares here")
    mixer = WindowAttention(file.hyper["dim"], window=side, num_heads=heads)
    fill_stacked(mixer, file.weights)
    mixer.position_table = file.weights["relative_position_bias_table"]
    assert_close(mixer.position_bias((side, side)), file.out["rel_bias"])
    index = file.inputs["relative_position_index"].reshape(-1)
    bias = mixer.position_table[index].reshape(side**2, side**2, heads)
    assert mx.array_equal(mixer.position_bias((side, side)), mx.moveaxis(bias, -1, 0))
    maps = file.inputs["x"].reshape(-1, side, side, file.hyper["dim"])
    assert_close(mixer(maps).reshape(file.out["y"].shape), file.out["y"])
    # a mask of numbers is a term of the scores like another
    masks = file.inputs["mask"]
    for n, window in enumerate(file.inputs["x"]):
        mask = masks[n % len(masks)]
        got = mixer.run(window[None], bias=mixer.position_bias((side, side)) + mask, seen=None)
        assert_close(got[0], file.out["y_masked"][n])


def _swin_block(
    file: GoldenFile, x: mx.array, weights: Weights, mixer: WindowAttention
) -> mx.array:
    eps = file.hyper.get("ln_eps", 1e-5)
    x = x + mixer(layer_norm(x, weights, "norm1", eps))
    return x + feed_forward(part(weights, "mlp."))(layer_norm(x, weights, "norm2", eps))


@golden("swin__block_regular", "swin__block_shifted", "swin__block_shifted_padded")
def test_swin_blocks(file: GoldenFile) -> None:
    side, shift = file.hyper["window"][0], file.hyper["shift"]
    mixer = WindowAttention(
        file.hyper["dim"],
        window=side,
        shift=shift,
        pads_first=False,
        num_heads=file.hyper["heads"],
    )
    fill_stacked(mixer, part(file.weights, "attn."))
    mixer.position_table = file.weights["attn.relative_position_bias_table"]
    assert_close(_swin_block(file, file.inputs["x"], file.weights, mixer), file.out["y"])


@golden("swin__layer_shifted_padded_transformers")
def test_swin_layer_that_pads_first(file: GoldenFile) -> None:
    mixer = WindowAttention(
        file.hyper["dim"],
        window=file.hyper["window"],
        shift=file.hyper["shift"],
        num_heads=file.hyper["heads"],
    )
    inner = part(file.weights, "attention.")
    theirs = ("q_proj", "k_proj", "v_proj", "o_proj")
    fill(mixer, inner, dict(zip((*QKV, "output_proj"), theirs, strict=True)))
    mixer.position_table = inner["relative_position_bias.relative_position_bias_table"]
    names = {"layernorm_before.": "norm1.", "layernorm_after.": "norm2.", "mlp.": "mlp."}
    weights = {
        ours + name: value
        for theirs, ours in names.items()
        for name, value in part(file.weights, theirs).items()
    }
    height, width = file.hyper["resolution"]
    x = file.inputs["x"].reshape(-1, height, width, file.hyper["dim"])
    got = _swin_block(file, x, weights, mixer)
    assert_close(got.reshape(file.out["y"].shape), file.out["y"])


@golden("swin__patch_merging")
def test_patch_merging(file: GoldenFile) -> None:
    merging = PatchMerging(file.hyper["dim"], output_dims=file.hyper["out"])
    fill(merging, file.weights, {"norm": "norm", "reduction": "reduction"})
    assert_close(merging(file.inputs["x"]), file.out["y"])


@golden("conv2former__modulation")
def test_convolutional_modulation(file: GoldenFile) -> None:
    dims, weights = file.hyper["dim"], as_linears(file.weights)
    mixer = ConvolutionalModulation(dims, kernel_size=file.hyper["kernel"])
    fill(mixer, weights, {"gate_proj": "att.0", "value_proj": "v", "output_proj": "proj"})
    fill_depthwise(mixer.convolution, weights, "att.2")
    x = channels_last(file.inputs["x"])
    got = mixer(layer_norm(x, weights, "norm", file.hyper["ln_eps"]))
    assert_close(got, channels_last(file.out["y"]))


def _cross_covariance(
    dims: int, heads: int, weights: Weights, is_stacked: bool = False
) -> CrossCovarianceAttention:
    mixer = CrossCovarianceAttention(dims, num_heads=heads, is_stacked=is_stacked)
    if is_stacked:
        fill(mixer, weights, {"qkv_proj": "qkv", "output_proj": "proj"})
    else:
        fill_stacked(mixer, weights)
    mixer.temperature = weights["temperature"].reshape(-1)
    return mixer


@golden("edgenext__xca")
@pytest.mark.parametrize("is_stacked", [False, True])
def test_cross_covariance_attention(file: GoldenFile, is_stacked: bool) -> None:
    mixer = _cross_covariance(file.hyper["dim"], file.hyper["heads"], file.weights, is_stacked)
    assert_close(mixer(as_map(file.inputs["x"])), as_map(file.out["y"]))


@golden("efficientvit__lite_mla")
def test_multi_scale_attention(file: GoldenFile) -> None:
    dims, weights = file.hyper["channels"], file.weights
    mixer = MultiScaleAttention(
        dims,
        head_dim=file.hyper["head_dim"],
        scales=file.hyper["scales"],
        eps=file.hyper["eps"],
        norm_eps=file.hyper["bn_eps"],
    )
    fill(mixer, as_linears(weights), {"qkv_proj": "qkv.conv", "output_proj": "proj.conv"})
    for n, scale in enumerate(mixer.scales):
        fill_depthwise(scale.convolution, weights, f"aggreg.{n}.0")
        scale.weight = weights[f"aggreg.{n}.1.weight"].reshape(scale.weight.shape)
    fill_norm(mixer.output_norm, weights, "proj.norm")
    mixer.eval()
    assert_close(mixer(channels_last(file.inputs["x"])), channels_last(file.out["y"]))


@golden("metaformer__pooling")
def test_spatial_pooling(file: GoldenFile) -> None:
    x = channels_last(file.inputs["x"])
    mixer = SpatialPooling(x.shape[-1], window=file.hyper.get("pool_size", 3))
    assert_close(mixer(x), channels_last(file.out["y"]))


@golden(
    "swiftformer__efficient_additive_attention",
    "swiftformer__efficient_additive_attention_2x",
    "swiftformer__transformers_variant",
)
def test_additive_attention(file: GoldenFile) -> None:
    weights = {name.replace("Proj.", "proj."): value for name, value in file.weights.items()}
    dims = file.hyper["dim"]
    has_ones = "every weight is 1" in file.hyper.get("rule", "")
    mixer = AdditiveAttention(
        dims,
        num_heads=weights["w_g"].shape[0] // dims,
        weights="ones" if has_ones else "norm",
    )
    names = {"query_proj": "to_query", "key_proj": "to_key", "inner_proj": "proj"}
    fill(mixer, weights, names | {"output_proj": "final"})
    mixer.query_weight = weights["w_g"]
    assert_close(mixer(as_map(file.inputs["x"])), as_map(file.out["y"]))


def test_a_window_of_the_whole_map_is_full_attention() -> None:
    mixer = WindowAttention(8, window=7, shift=3, num_heads=2)
    mixer.position_table = mx.zeros_like(mixer.position_table)
    x = mx.random.normal((1, 5, 4, 8))
    tokens = np.array(x).reshape(20, 8).astype(np.float64)

    def projected(name: str, x: np.ndarray) -> np.ndarray:
        linear = mixer[name]
        return x @ np.array(linear.weight, np.float64).T + np.array(linear.bias, np.float64)

    q, k, v = (projected(name, tokens).reshape(20, 2, 4).swapaxes(0, 1) for name in QKV)
    scores = q @ k.swapaxes(1, 2) / 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(20, 8)
    want = mx.array(projected("output_proj", y).astype(np.float32)).reshape(1, 5, 4, 8)
    assert_close(mixer(x), want)
