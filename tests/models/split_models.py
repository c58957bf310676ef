"""One of the processes of `test_tensor_parallel.py`: runs models whole and split, prints both."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.generation import with_key_values
from mlx_mmfree.layers import PackedBitLinear, pack_linears
from mlx_mmfree.layers.lora import LoRALinear
from mlx_mmfree.layers.matrix import converted
from mlx_mmfree.layers.sharded_linear import sharded_to_all
from mlx_mmfree.layers.ternary.values import pack_ternary_values
from mlx_mmfree.models import Decoder, find, metaformer
from mlx_mmfree.models.parts.tensor_parallel import shard
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.ops import pack_ternary, ternarize
from tests.hub.checkpoints import tiny_model, tiny_transformer
from tests.process_group import connect

TOKENS = mx.array([[1, 5, 9, 2, 7, 7, 3], [4, 4, 8, 0, 30, 21, 6]])
VALID = mx.array([[False, False, *[True] * 5], [True] * 7])
DENSE: dict[str, Any] = {"linears": None, "attention_bias": True, "mlp_bias": True}
RECURRENT = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "token_mixer": "gru",
}
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


def ternary_values() -> Decoder:
    """A dense model whose weights are ternary, packed as such."""
    model = tiny_transformer("qwen3", linears=None)
    for block in model.blocks:
        for mixer in (block.token_mixer, block.channel_mixer):
            for name, linear in mixer.children().items():
                if isinstance(linear, nn.Linear):
                    trits, scale = ternarize(linear.weight)
                    linear.weight = trits * scale
                    mixer[name] = pack_ternary_values(linear)
    return model


def quantized() -> Decoder:
    model = tiny_transformer("llama", linears=None, **WIDE)
    nn.quantize(model, group_size=32, bits=4)
    return model


def hybrid_hgrn2() -> Decoder:
    """Gates with lower bounds, and attention with biases between them."""
    attention = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}
    keys = {"attn": attention, "num_hidden_layers": 3, "initializer_range": 0.3}
    architecture = find("hgrn2")
    mx.random.seed(5)
    model: Decoder = architecture.build(architecture.config.from_hub({**architecture.tiny, **keys}))
    model.lower_bounds = mx.random.normal(model.lower_bounds.shape)
    return model


MODELS: dict[str, Callable[[], Decoder]] = {
    "hybrid hgrn2": hybrid_hgrn2,
    "bitnet": lambda: pack_linears(tiny_transformer("bitnet")),
    "bitnet at word boundaries": lambda: tiny_transformer("bitnet", **WIDE),
    "bitnet float16": lambda: converted(pack_linears(tiny_transformer("bitnet")), mx.float16),
    "ternary llama": lambda: tiny_transformer("llama", attention_bias=True),
    "ternary llama, norms inside": lambda: tiny_transformer(
        "llama", linears=TernaryLinears(norm_eps=1e-6)
    ),
    "matmul-free": tiny_model,
    "dense llama": lambda: tiny_transformer("llama", **DENSE),
    "quantized llama": quantized,
    "dense qwen3": lambda: tiny_transformer("qwen3", **DENSE),
    "qwen3 of ternary values": ternary_values,
    "minicpm": lambda: tiny_transformer("minicpm", scale_emb=12.0, dim_model_base=8.0),
    "quantized keys and values": lambda: with_key_values(
        tiny_transformer("bitnet", **WIDE), kv_bits=8, kv_group_size=32, quantized_kv_start=3
    ),
}


STEPS = {
    "bitnet": 4,
    "matmul-free": 4,
    "dense llama": 4,
    "dense qwen3": 4,
    "quantized keys and values": 1,
}
"""Greedy tokens; collectives between processes on one busy machine take milliseconds each."""


def metrics(model: Decoder, steps: int) -> dict[str, Any]:
    """Logits of padded rows, and greedy tokens by the state."""
    logits, state = model(TOKENS, valid=VALID)
    padded, tokens = mx.where(VALID[..., None], logits, 0), []
    for _ in range(steps):
        tokens.append(logits[:, -1].argmax(axis=-1))
        logits, state = model(tokens[-1][:, None], state)
    return {
        "logits": padded.astype(mx.float32).tolist(),
        "tokens": [step.tolist() for step in tokens],
        "bytes": sum(
            module.weight.nbytes for name, module in model.named_modules() if name.endswith("_proj")
        ),
    }


def same_products(group: mx.distributed.Group) -> list[bool]:
    """Returns whether layers that are split by inputs give the bits of whole ones, NaN included."""
    same = []
    mx.random.seed(4)
    layers: list[tuple[int, dict[str, Any]]] = [
        (96, {}),
        (44, {"bias": True}),
        (128, {"rounding": "half_away"}),
        (96, {"norm_eps": 1e-6}),
    ]
    for inputs, options in layers:
        whole = PackedBitLinear(inputs, 24, **options)
        trits = mx.random.randint(-1, 2, (24, inputs))
        whole.weight, whole.scale = pack_ternary(trits), mx.array([0.3])
        x = mx.random.normal((3, inputs))
        x[0, inputs - 1] = mx.nan
        width = inputs // group.size()
        part = x[:, group.rank() * width : (group.rank() + 1) * width]
        got, want = sharded_to_all(whole, group)(part), whole(x)
        same.append(mx.array_equal(got, want, equal_nan=True).item())
        same.append(mx.isnan(got[0]).all().item() and not mx.isnan(got[1:]).any().item())
    return same


def refusals() -> list[str]:
    adapted = tiny_transformer("llama", linears=None)
    adapted.blocks[1].channel_mixer.up_proj = LoRALinear(
        adapted.blocks[1].channel_mixer.up_proj, rank=2
    )
    return [
        _refusal(adapted),
        _refusal(tiny_transformer("llama", num_attention_heads=6, num_key_value_heads=3)),
        _refusal(tiny_transformer("llama", intermediate_size=45)),
        _refusal(metaformer.build(metaformer.Config.from_hub(RECURRENT))),
    ]


def _refusal(model: Decoder) -> str:
    try:
        shard(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main() -> None:
    mx.set_default_device(mx.cpu)
    group = connect()
    result: dict[str, Any] = {"products": same_products(group), "refusals": refusals()}
    result["models"] = {
        name: {
            "whole": metrics(pack_linears(build()), STEPS.get(name, 0)),
            "split": metrics(shard(build(), group), STEPS.get(name, 0)),
        }
        for name, build in MODELS.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
