"""One of the processes of `test_tensor_parallel.py`: models of each mixer, whole and split.

Prints for each how far the results lie apart, and which share of the weights the process holds.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.attention.positions import ALiBi, PositionBias, RelativeBias
from mlx_mmfree.models import metaformer
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.encoders import EncoderDecoder
from mlx_mmfree.models.parts.mixers import token_mixers
from mlx_mmfree.models.parts.stack import Stack, TokenModel
from mlx_mmfree.models.parts.tensor_parallel import shard
from mlx_mmfree.token_mixers import GQA
from tests.process_group import connect
from tests.tolerances import relative_error

LENGTH = 21
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "attention_sink": [{"is_learned": True}],
    "big_bird": [{"block_size": 2, "num_random": 1}],
    "gqa": [{"num_kv_heads": 4}],
    "linformer": [{}, {"has_one_kv_head": True}],
    "local_attention": [{"block_size": 4}],
    "longformer": [{"window": 3}],
    "mlgru": [
        {"conv_size": 3, "share_conv": False},
        {"stacking": "all", "output_gate": "sigmoid"},
        {"stacking": "recurrence", "conv_size": 3},
    ],
    "reformer": [{"chunk_size": 4}],
    "relu_attention": [{"normalization": "gated_norm"}],
    "sima": [{}, {"class_only": True}],
    "sinkhorn": [{"block_size": 4}],
    "sliding_window_attention": [{"window": 4}],
    "synthesizer": [
        {"scores": "dense", "has_products": True},
        {"scores": "random"},
        {"scores": "factorized_dense"},
        {"scores": "factorized_random"},
    ],
}
WHOLE = (
    *("gmlp", "gru", "mlp_mixer", "ring_attention"),
    *("delta_net", "gated_delta_net", "kda", "mamba2", "rwkv7", "rwkv7_channel"),
)
"""Mixers with weights whose heads or channels cannot be told apart, or are not yet."""


def models() -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and the description of each model."""
    for name, mixer in token_mixers().items():
        if name in WHOLE:
            continue
        has_heads = "num_heads" in inspect.signature(mixer).parameters
        heads = {"num_heads": 4} if has_heads else {}
        for options in OPTIONS.get(name, [{}]):
            for task in ("causal_lm", "masked_lm"):
                if mixer.causal if task == "causal_lm" else mixer.bidirectional:
                    choice = {"name": name, **heads, **options}
                    yield f"{name} {options} {task}", {"token_mixer": choice, "task": task}
    for linears in ("dense", "ternary"):
        hybrid = ["mlgru", {"name": "gla", "num_heads": 4}, {"name": "gqa", "num_heads": 4}]
        yield (
            f"{linears} hybrid",
            {
                "token_mixer": hybrid,
                "linear_class": linears,
                "positions": "rope",
                "num_hidden_layers": 3,
            },
        )
    attention = {"name": "multi_head_attention", "num_heads": 4}
    yield (
        "encoder-decoder",
        {
            "token_mixer": attention,
            "memory_mixer": attention,
            "task": "encoder_decoder",
            "channel_mixer": "feed_forward",
            "linear_class": "ternary",
        },
    )


def made(description: dict[str, Any]) -> TokenModel:
    """The same model in every process, with weights far from zero."""
    mx.random.seed(3)
    config = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        **description,
    }
    model = metaformer.build(metaformer.Config.from_hub(config)).eval()
    pack_linears(model)
    return model


def logits(model: Any, steps: int) -> mx.array:
    """Results of padded rows and, of a model that can, of tokens read one by one after them."""
    mx.random.seed(7)
    tokens = mx.random.randint(0, 40, (2, LENGTH))
    valid = mx.arange(LENGTH) >= mx.array([0, 5])[:, None]
    if isinstance(model, EncoderDecoder):
        return model(tokens, tokens[:, :4], source_valid=valid)[0]
    if not hasattr(model, "init_state") or not model.is_causal:
        return mx.where(valid[..., None], model(tokens, valid=valid), 0)
    got, state = model(tokens, valid=valid)
    parts = [mx.where(valid[..., None], got, 0)]
    for n in range(steps):
        got, state = model(tokens[:, n : n + 1], state)
        parts.append(got)
    return mx.concatenate(parts, axis=1)


def size_of(model: nn.Module) -> int:
    return sum(
        module.weight.nbytes for name, module in model.named_modules() if name.endswith("_proj")
    )


def stacks() -> Iterator[tuple[str, Callable[[], Stack]]]:
    """Attention with terms that each head adds by the distance."""
    for bias in (ALiBi, RelativeBias):

        def make(bias: type[PositionBias] = bias) -> Stack:
            mx.random.seed(5)
            mixer = GQA(32, num_heads=8, num_kv_heads=4, position_bias=bias(8))
            return Stack([Block(32, mixer, FeedForward(32))], nn.RMSNorm(32))

        yield bias.__name__, make


def main() -> None:
    mx.set_default_device(mx.cpu)
    group = connect()
    # collectives between many processes on one busy machine take milliseconds each
    steps = 3 if group.size() == 2 else 0
    found: dict[str, dict[str, float]] = {}
    for name, description in models():
        whole = made(description)
        split = shard(made(description), group)
        error = relative_error(logits(split, steps), logits(whole, steps))
        found[name] = {"error": error, "share": size_of(split) / max(size_of(whole), 1)}
    x = mx.random.normal((2, LENGTH, 32), key=mx.random.key(1))
    for name, make in stacks():
        wanted = make().transform(x)
        found[name] = {"error": relative_error(shard(make(), group).transform(x), wanted)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
