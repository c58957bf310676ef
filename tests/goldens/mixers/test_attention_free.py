"""Mixers without attention: FNet, gMLP and MLP-Mixer."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.ops.activations import gelu_tanh
from mlx_mmfree.token_mixers import GMLP, FNet, MLPMixer
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


@golden("fnet__layer")
def test_fnet(file: GoldenFile) -> None:
    x, weights = file.inputs["x"], file.weights
    mixer = FNet(x.shape[-1])
    assert_close(mixer(x)[0], file.out["mix"])
    everything = mx.ones(x.shape[:2], mx.bool_)
    assert_close(mixer(x, None, everything)[0], file.out["mix"])
    eps = file.hyper["ln_eps"]
    first, second = nn.LayerNorm(x.shape[-1], eps=eps), nn.LayerNorm(x.shape[-1], eps=eps)
    up, down = nn.Linear(1, 1), nn.Linear(1, 1)
    layer = {"first": first, "second": second, "up": up, "down": down}
    names = ("fourier.output.LayerNorm", "output.LayerNorm", "intermediate.dense", "output.dense")
    fill(layer, weights, dict(zip(layer, names, strict=True)))
    h = first(x + mixer(x)[0])
    assert_close(second(h + down(gelu_tanh(up(h)))), file.out["layer"])


@golden(*(f"gmlp__block_{kind}" for kind in ("amlp_causal", "causal", "heads2", "noncausal")))
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_gmlp(file: GoldenFile, cut: int) -> None:
    hyper, weights, x = file.hyper, file.weights, file.inputs["x"]
    mixer = GMLP(
        hyper["dim"],
        max_length=hyper["seq_len"],
        hidden_dims=hyper["dim_ff"],
        num_heads=hyper["heads"],
        attention_dims=hyper["attn_dim"],
        norm_eps=hyper["ln_eps"],
        is_causal=hyper["causal"],
    )
    names = {"input_proj": "proj_in.0", "output_proj": "proj_out", "gate_norm": "sgu.norm"}
    fill(mixer, weights, names)
    mixer.spatial_weight, mixer.spatial_bias = weights["sgu.weight"], weights["sgu.bias"]
    if hyper["attn_dim"] is not None:
        fill(mixer, weights, {"attention_proj": "attn.to_out"})
        for part, name in enumerate(("query_proj", "key_proj", "value_proj")):
            mixer[name].weight = mx.split(weights["attn.to_qkv.weight"], 3)[part]
    if not hyper["causal"]:
        assert_close(mixer(x)[0], file.out["y"])
        return
    state, parts = None, []
    for start in range(0, x.shape[1], cut):
        y, state = mixer(x[:, start : start + cut], state)
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1), file.out["y"])
    short = file.out["y_short"]
    assert_close(mixer(x[:, : short.shape[1]])[0], short)


@golden("gmlp__timm_block")
def test_gmlp_of_images(file: GoldenFile) -> None:
    hyper, weights, x = file.hyper, file.weights, file.inputs["x"]
    mixer = GMLP(
        hyper["dim"],
        max_length=hyper["tokens"],
        hidden_dims=hyper["dim"] * hyper["mlp_ratio"],
        norm_eps=hyper["gate_norm_eps"],
        is_causal=False,
    )
    names = {"input_proj": "fc1", "output_proj": "fc2", "gate_norm": "gate.norm"}
    fill(mixer, weights, {ours: f"mlp_channels.{theirs}" for ours, theirs in names.items()})
    mixer.spatial_weight = weights["mlp_channels.gate.proj.weight"][None]
    mixer.spatial_bias = weights["mlp_channels.gate.proj.bias"][None]
    norm = nn.LayerNorm(hyper["dim"], eps=hyper["norm_eps"])
    norm.weight, norm.bias = weights["norm.weight"], weights["norm.bias"]
    assert_close(x + mixer(norm(x))[0], file.out["y"])


@golden("mlp_mixer__block")
def test_mlp_mixer(file: GoldenFile) -> None:
    hyper, dims = file.hyper, file.hyper["dim"]
    tokens = MLPMixer(dims, max_length=hyper["tokens"], num_hidden=hyper["token_hidden"])
    channels = FeedForward(dims, hidden_dims=hyper["channel_hidden"], activation="gelu")
    block = Block(dims, tokens, channels, norm=nn.LayerNorm, norm_eps=hyper["ln_eps"])
    linears = {"up_length_proj": "mlp_tokens.fc1", "down_length_proj": "mlp_tokens.fc2"}
    fill(tokens, file.weights, linears)
    fill(channels, file.weights, {"up_proj": "mlp_channels.fc1", "down_proj": "mlp_channels.fc2"})
    fill(block, file.weights, {"token_norm": "norm1", "channel_norm": "norm2"})
    assert_close(block(file.inputs["x"])[0], file.out["y"])
