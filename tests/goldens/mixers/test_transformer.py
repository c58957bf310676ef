"""Encoder and decoder layers of the Transformer, and both stacks."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.layers.context import Context
from mlx_mmfree.models import Block, Stack
from mlx_mmfree.token_mixers import MultiHeadAttention
from tests.goldens.mixers.attention import fill_packed
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


def _block(file: GoldenFile, prefix: str, *, is_decoder: bool = False) -> Block:
    """A layer in the names of torch, filled with the weights after the prefix."""
    hyper, dims = file.hyper, file.hyper["d_model"]
    weights = {k[len(prefix) :]: v for k, v in file.weights.items() if k.startswith(prefix)}
    heads: dict[str, Any] = {"num_heads": hyper["nhead"], "bias": True}
    own = MultiHeadAttention(dims, is_causal=is_decoder, **heads)
    memory = MultiHeadAttention(dims, is_causal=False, **heads) if is_decoder else None
    channel = FeedForward(
        dims, hidden_dims=hyper["dim_feedforward"], activation=hyper["activation"].split()[0]
    )
    block = Block(
        dims,
        own,
        channel,
        memory_mixer=memory,
        norm=nn.LayerNorm,
        norm_eps=hyper["eps"],
        norm_order=hyper["norm"],
    )
    names = ["token_norm", *(["memory_norm"] if is_decoder else []), "channel_norm"]
    fill(block, weights, {name: f"norm{n + 1}" for n, name in enumerate(names)})
    fill(channel, weights, {"up_proj": "linear1", "down_proj": "linear2"})
    for mixer, theirs in ((own, "self_attn"), (memory, "multihead_attn")):
        if mixer is not None:
            packed = (weights[f"{theirs}.in_proj_{part}"] for part in ("weight", "bias"))
            fill_packed(mixer, *packed)
            fill(mixer, weights, {"output_proj": f"{theirs}.out_proj"})
    return block


@golden("transformer__encoder_layer_postln", "transformer__encoder_layer_preln_gelu")
def test_encoder_layer(file: GoldenFile) -> None:
    assert_close(_block(file, "")(file.inputs["x"])[0], file.out["y"])


@golden("transformer__decoder_layer_postln")
def test_decoder_layer(file: GoldenFile) -> None:
    block = _block(file, "", is_decoder=True)
    context = Context(memory=file.inputs["memory"])
    assert_close(block(file.inputs["tgt"], None, context)[0], file.out["y"])


@golden("transformer__decoder_layer_postln")
def test_decoder_layer_step_by_step(file: GoldenFile) -> None:
    """With keys and values of the memory computed once."""
    block, state, parts = _block(file, "", is_decoder=True), None, []
    x = file.inputs["tgt"]
    for n in range(x.shape[1]):
        y, state = block(x[:, n : n + 1], state, Context(memory=file.inputs["memory"]))
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1), file.out["y"])


def _stack(file: GoldenFile, name: str, count: int) -> Stack:
    is_decoder = name == "decoder"
    blocks = [_block(file, f"{name}.layers.{n}.", is_decoder=is_decoder) for n in range(count)]
    norm = nn.LayerNorm(file.hyper["d_model"], eps=file.hyper["eps"])
    stack = Stack(blocks, norm)
    fill(stack, file.weights, {"norm": f"{name}.norm"})
    return stack


@golden("transformer__encdec_core")
def test_both_stacks(file: GoldenFile) -> None:
    memory = _stack(file, "encoder", file.hyper["enc_layers"]).transform(file.inputs["src"])
    decoder = _stack(file, "decoder", file.hyper["dec_layers"])
    y = decoder.transform(file.inputs["tgt"], Context(memory=memory))
    assert_close(y, file.out["y"])
