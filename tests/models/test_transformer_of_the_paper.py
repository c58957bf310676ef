"""The encoder-decoder that a description makes is the Transformer of PyTorch (arXiv 1706.03762)."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.models import EncoderDecoder, find
from mlx_mmfree.models.parts.block import Block
from tests.tolerances import TOLERANCE, relative_error

pytestmark = pytest.mark.interop

DIMS, HEADS, HIDDEN, VOCABULARY = 32, 4, 48, 50


def _model(norm_order: str) -> EncoderDecoder:
    mx.random.seed(3)
    attention = {"name": "multi_head_attention", "num_heads": HEADS, "bias": True}
    architecture = find("metaformer")
    config = architecture.config.from_hub(
        {
            "task": "encoder_decoder",
            "vocab_size": VOCABULARY,
            "hidden_size": DIMS,
            "num_hidden_layers": 2,
            "encoder_layers": 3,
            "intermediate_size": HIDDEN,
            "token_mixer": attention,
            "memory_mixer": attention,
            "channel_mixer": {"name": "feed_forward", "activation": "relu", "bias": True},
            "norm": "layer_norm",
            "norm_eps": 1e-5,
            "norm_order": norm_order,
            "positions": "sinusoidal",
            "scale_embedding": True,
            "initializer_range": 0.2,
        }
    )
    model: EncoderDecoder = architecture.build(config)
    for _, module in model.named_modules():
        for name in ("weight", "bias"):
            if name in module and module[name].ndim == 1:
                # norms and biases that are not the first ones
                module[name] = module[name] + 0.1 * mx.random.normal(module[name].shape)
    return model


def _tensor(array: mx.array) -> Any:
    import torch

    return torch.tensor(np.array(array)).double()


def _copy(theirs: Any, *ours: Any) -> None:
    """Puts our linears, one above the other, or our norm into theirs."""
    import torch

    for name in ("weight", "bias"):
        stacked = torch.cat([_tensor(module[name]) for module in ours])
        getattr(theirs, name).data.copy_(stacked)


def _copy_attention(theirs: Any, ours: Any) -> None:
    import torch

    projections = [ours[f"{name}_proj"] for name in ("query", "key", "value")]
    theirs.in_proj_weight.data.copy_(torch.cat([_tensor(p.weight) for p in projections]))
    theirs.in_proj_bias.data.copy_(torch.cat([_tensor(p.bias) for p in projections]))
    _copy(theirs.out_proj, ours.output_proj)


def _copy_block(theirs: Any, ours: Block) -> None:
    norms = ["token_norm", "channel_norm"]
    _copy_attention(theirs.self_attn, ours.token_mixer)
    if "memory_mixer" in ours:
        norms.insert(1, "memory_norm")
        _copy_attention(theirs.multihead_attn, ours.memory_mixer)
    for number, name in enumerate(norms, 1):
        _copy(getattr(theirs, f"norm{number}"), ours[name])
    _copy(theirs.linear1, ours.channel_mixer.up_proj)
    _copy(theirs.linear2, ours.channel_mixer.down_proj)


def _theirs(model: EncoderDecoder, norm_order: str) -> Any:
    import torch

    is_pre = norm_order == "pre"
    options = {"norm_first": is_pre, "batch_first": True, "dropout": 0.0, "dtype": torch.float64}
    # otherwise a prototype, which warns
    encoder = partial(torch.nn.TransformerEncoder, enable_nested_tensor=False)
    stacks = []
    for stack, layer, many in (
        (model.encoder, torch.nn.TransformerEncoderLayer, encoder),
        (model, torch.nn.TransformerDecoderLayer, torch.nn.TransformerDecoder),
    ):
        norm = torch.nn.LayerNorm(DIMS, dtype=torch.float64) if is_pre else None
        made = many(layer(DIMS, HEADS, HIDDEN, **options), len(stack.blocks), norm=norm)
        for theirs, ours in zip(made.layers, stack.blocks, strict=True):
            _copy_block(theirs, ours)
        if norm is not None:
            _copy(made.norm, stack.norm)
        stacks.append(made.eval())
    return stacks


def _embedded(model: EncoderDecoder, tokens: np.ndarray) -> Any:
    """Section 3.4 and 3.5: rows times the root of the dims, and sines beside cosines."""
    import torch

    rows = _tensor(model.embed.weight)[torch.tensor(tokens)] * DIMS**0.5
    angles = np.arange(tokens.shape[1])[:, None] / 10000 ** (np.arange(0, DIMS, 2) / DIMS)
    codes = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(tokens.shape[1], DIMS)
    return rows + torch.tensor(codes)


@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_logits_are_those_of_torch(norm_order: str) -> None:
    import torch

    model = _model(norm_order)
    rng = np.random.default_rng(1)
    source, target = (rng.integers(0, VOCABULARY, (2, length)) for length in (7, 5))
    source_valid = np.arange(7) < np.array([[7], [4]])
    got, _ = model(mx.array(source), mx.array(target), source_valid=mx.array(source_valid))
    encoder, decoder = _theirs(model, norm_order)
    padded = torch.tensor(~source_valid)
    with torch.no_grad():
        memory = encoder(_embedded(model, source), src_key_padding_mask=padded)
        hidden = decoder(
            _embedded(model, target),
            memory,
            tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(5).double(),
            memory_key_padding_mask=padded,
        )
        want = hidden @ _tensor(model.embed.weight).T
    assert relative_error(got, mx.array(want.float().numpy())) <= TOLERANCE[mx.float32]
