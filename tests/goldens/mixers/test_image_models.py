"""Whole image models, and what selects tokens in them."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.models import ImageClassifier
from mlx_mmfree.models.parts.image_classifier import ImageBlock, Stage
from mlx_mmfree.models.parts.patch_model import PatchTokens
from mlx_mmfree.models.vit import (
    SelectingStage,
    TokenSelector,
    chosen_first,
    with_scores,
)
from mlx_mmfree.token_mixers import MLPMixer, MultiHeadAttention
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


@golden("mlp_mixer__model_lucidrains")
def test_mlp_mixer(file: GoldenFile) -> None:
    hyper = file.hyper
    dims, patch, channels = hyper["dim"], hyper["patch"], hyper["channels"]
    norm = partial(nn.LayerNorm, eps=hyper["ln_eps"])
    height, width = hyper["image"]
    embed = PatchTokens(channels, dims, patch_size=patch, image_size=(height, width))
    # rows and columns of a patch, then channels, as here
    fill(embed.patches, file.weights, {"linear": "1"})
    blocks = []
    for number in range(2, 2 + hyper["depth"]):
        mixer = MLPMixer(dims, max_length=embed.length, num_hidden=hyper["token_hidden"])
        weights = {
            name: value.squeeze(-1) if value.ndim == 3 else value
            for name, value in file.weights.items()
        }
        names = ("up_length_proj", "down_length_proj")
        along, across = (f"{number}.{branch}" for branch in range(2))
        fill(mixer, weights, dict(zip(names, (f"{along}.fn.0", f"{along}.fn.3"), strict=True)))
        channel_mixer = FeedForward(dims, hidden_dims=hyper["channel_hidden"], activation="gelu")
        names = ("up_proj", "down_proj")
        fill(
            channel_mixer,
            weights,
            dict(zip(names, (f"{across}.fn.0", f"{across}.fn.3"), strict=True)),
        )
        block = ImageBlock(dims, mixer, channel_mixer, norm=norm)
        fill(block, weights, {"mixer_norm": f"{along}.norm", "channel_norm": f"{across}.norm"})
        blocks.append(block)
    model = ImageClassifier(
        embed, [Stage(blocks)], nn.Linear(dims, hyper["classes"]), neck=norm(dims)
    )
    after = 2 + hyper["depth"]
    fill(model, file.weights, {"neck": str(after), "head": str(after + 2)})
    assert_close(model(mx.moveaxis(file.inputs["x"], 1, -1)), file.out["y"])


@golden("tosa__layer_pair")
def test_token_selection(file: GoldenFile) -> None:
    hyper = file.hyper
    dims, heads, keep = hyper["dim"], hyper["heads"], hyper["keep"]
    blocks = []
    for number in (1, 2):
        mixer = MultiHeadAttention(
            dims, num_heads=heads, bias=True, is_stacked=True, is_causal=False
        )
        channel_mixer = FeedForward(dims, hidden_dims=hyper["mlp_hidden"], activation="gelu")
        block = ImageBlock(
            dims, mixer, channel_mixer, norm=partial(nn.LayerNorm, eps=hyper["ln_eps"])
        )
        for module, parts in (
            (block, {"mixer_norm": "norm1", "channel_norm": "norm2"}),
            (mixer, {"qkv_proj": "attn.qkv", "output_proj": "attn.proj"}),
            (channel_mixer, {"up_proj": "mlp.fc1", "down_proj": "mlp.fc2"}),
        ):
            names = {ours: f"layer{number}.{theirs}" for ours, theirs in parts.items()}
            fill(module, file.weights, names)
        blocks.append(block)
    stage = SelectingStage(
        blocks, keep=keep / hyper["tokens"], hidden_dims=hyper["selector_hidden"]
    )
    selector: TokenSelector = stage.selectors[0]
    weights = {
        name: value.squeeze(-1) if value.ndim == 3 else value
        for name, value in file.weights.items()
    }
    fill(selector, weights, {"up_proj": "selector.conv1", "down_proj": "selector.conv2"})
    x = file.inputs["x"]
    y, scores = with_scores(blocks[0], x)
    assert_close(y, file.out["layer1"])
    assert_close(blocks[0](x), file.out["layer1"])
    assert_close(scores, file.aux["scores_qk"])
    predicted = selector(scores)
    assert_close(predicted, file.aux["pred_log_attn"])
    importance = selector.importance(predicted)
    assert_close(importance, file.aux["importance"])
    chosen, others = chosen_first(importance, keep)
    assert chosen.tolist() == file.aux["selected"].tolist()
    assert chosen.shape[1] + others.shape[1] == hyper["tokens"]
    assert_close(stage.transform(x), file.out["y"])
