"""The models that are compared: metaformers of equal size, and formats of a MatMul-free model."""

import inspect
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mmfree import MLGRU, BitLinear, SwiGLU
from mlx_mmfree.models import Decoder
from mlx_mmfree.models.hgrn_bit import HGRNBit
from mlx_mmfree.models.metaformer import ARCHITECTURE
from mlx_mmfree.models.parts.architecture import draw_weights
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.mixers import token_mixers

from .tasks import Task

DIMS, LAYERS, HEADS, WIDTH = 64, 2, 2, 128
"""`WIDTH` is the width of the channel mixer beside the reference."""

REFERENCE = "multi_head_attention"
WEIGHT_STD, EMBEDDING_STD = 0.05, 1.0
SIZES = {
    "dims": DIMS,
    "layers": LAYERS,
    "heads": HEADS,
    "width": WIDTH,
    "weight_std": WEIGHT_STD,
    "embedding_std": EMBEDDING_STD,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "attention_sink": {"window": 14, "sinks": 2},
    "gqa": {"num_kv_heads": 1},
    "gmlp": {"hidden_dims": 128, "num_heads": 1},
    "local_attention": {"block_size": 8},
    "mamba2": {"state_dims": 32},
    "pooling": {"window": 8},
    "reformer": {"chunk_size": 16},
    "sinkhorn": {"block_size": 8},
    "sliding_window_attention": {"window": 16},
}
"""Options beside the defaults: windows shorter than the sequences, keys and values shared by heads,
capacity for the gMLP's matrix, and keys of Mamba-2 as long as other heads'."""

_KNOWS_ORDER = (
    *("delta_net", "gated_delta_net", "gla", "gmlp", "gru", "hgrn", "hgrn2", "kda", "mamba2"),
    *("mlgru", "rwkv7", "synthesizer"),
)
"""Mixers that tell the order of tokens without a code of positions."""

_SHIFT = {"name": "sliding_window_attention", "window": 2}
"""Brings each token the one before. Many memories cannot, and other models have a short convolution."""

MLGRU_FORMATS: dict[str, dict[str, Any]] = {
    "MLGRU": {},
    "no lower bound": {"has_bound": False},
    "sigmoid for the gated norm": {"output_gate": "sigmoid"},
    "float activations": {"quantizes_activations": False},
}


POSITION_FORMATS: dict[str, dict[str, Any]] = {
    "rotation": {"positions": "rope"},
    "sinusoidal": {"positions": "sinusoidal"},
    "learned": {"positions": "learned"},
    "none": {"positions": "none"},
}
"""How softmax attention, the reference, encodes the order of tokens."""

_FULL = {"name": "multi_head_attention"}
_WINDOW = {"name": "sliding_window_attention", "window": 32}
_SINKS = {"name": "attention_sink", "window": 28, "sinks": 4}
_LEARNED = {"name": "attention_sink", "window": 32, "sinks": 0, "is_learned": True}
SINK_FORMATS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "all tokens": (_FULL, {"all tokens": _FULL, "window": _WINDOW, "sinks and window": _SINKS}),
    "window": (_WINDOW, {"window": _WINDOW}),
    "sinks and window": (_SINKS, {"sinks and window": _SINKS}),
    "learned sinks and window": (_LEARNED, {"learned sinks and window": _LEARNED}),
}
"""The attention of a model while it learns, and the mixers that read a long text with its weights."""

HYBRID_FORMATS: dict[str, tuple[str, ...]] = {
    "mlgru + gated_delta_net": ("mlgru", "gated_delta_net"),
    "4 mlgru": ("mlgru",) * 4,
    "3 mlgru + gated_delta_net": ("mlgru", "mlgru", "mlgru", "gated_delta_net"),
    "4 gated_delta_net": ("gated_delta_net",) * 4,
}
"""The mixer of each block of models of two and of four blocks, MatMul-free or of the delta rule."""


def causal_mixers() -> list[str]:
    """The names of the causal mixers that are compared.

    Ring attention is left out, which one process computes as the reference, and so is the channel mixer
    of RWKV-7, which only looks back by one token.
    """
    left_out = ("ring_attention", "rwkv7_channel")
    return [name for name, mixer in token_mixers().items() if mixer.causal and name not in left_out]


def metaformer(
    mixers: Sequence[Mapping[str, Any]],
    task: Task,
    seed: int,
    layers: int = LAYERS,
    **settings: Any,
) -> Decoder:
    """A model with fresh weights that has as many parameters as the reference, as near as can be.

    Args:
        mixers: The token mixers of the blocks, by turns: `name`, and options other than this
            comparison's.
        task: What it is for.
        seed: Seed of the weights.
        layers: Number of blocks.
        settings: Further keys of the description of the model.
    """
    names = [mixer["name"] for mixer in mixers]
    settings = {"positions": positions_of(names[0]), "num_hidden_layers": layers, **settings}
    one, two = (_parameters(_built(mixers, task, width, **settings)) for width in (1, 2))
    reference = _built([{"name": REFERENCE}], task, WIDTH, num_hidden_layers=layers)
    width = 1 + round((_parameters(reference) - one) / (two - one))
    if width < 1:
        raise ValueError(f"{' and '.join(names)} alone have more parameters than the reference.")
    mx.random.seed(seed)
    return _embedded(_built(mixers, task, width, **settings))


def positions_of(name: str) -> str:
    """A rotation of queries and keys where the mixer takes one, which finds what is near soonest."""
    if "rope" in _arguments(name):
        return "rope"
    return "none" if name in _KNOWS_ORDER else "learned"


def _arguments(name: str) -> Container[str]:
    return inspect.signature(token_mixers()[name].__init__).parameters


def _parameters(model: Decoder) -> int:
    parameters: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    return sum(array.size for array in parameters.values())


def _built(mixers: Sequence[Mapping[str, Any]], task: Task, width: int, **settings: Any) -> Decoder:
    if task.is_shifted:
        mixers = [_SHIFT, *mixers]
    description = {
        "vocab_size": task.vocab_size,
        "hidden_size": DIMS,
        "intermediate_size": width,
        "token_mixer": [_with_options(each) for each in mixers],
        "max_position_embeddings": task.length,
        "tie_word_embeddings": False,
        "initializer_range": WEIGHT_STD,
        **settings,
    }
    model: Decoder = ARCHITECTURE.build(ARCHITECTURE.config.from_hub(description))
    return model


def _with_options(mixer: Mapping[str, Any]) -> dict[str, Any]:
    name = mixer["name"]
    heads = {"num_heads": HEADS} if "num_heads" in _arguments(name) else {}
    return heads | OPTIONS.get(name, {}) | dict(mixer)


def mlgru_format(
    task: Task,
    seed: int,
    *,
    has_bound: bool = True,
    output_gate: Any = "norm",
    quantizes_activations: bool = True,
) -> Decoder:
    """A ternary MatMul-free model, or one without a part of it."""
    mx.random.seed(seed)
    linear = partial(BitLinear, norm_eps=1e-6, quantize_activations=quantizes_activations)
    blocks = [
        Block(
            DIMS,
            MLGRU(DIMS, linear=linear, output_gate=output_gate),
            SwiGLU(DIMS, hidden_dims=WIDTH, linear=linear),
        )
        for _ in range(LAYERS)
    ]
    head = linear(DIMS, task.vocab_size, bias=False)
    model = HGRNBit(nn.Embedding(task.vocab_size, DIMS), blocks, nn.RMSNorm(DIMS, eps=1e-6), head)
    if has_bound:
        model.lower_bounds = mx.zeros((LAYERS, DIMS))
    return _embedded(draw_weights(model, WEIGHT_STD))


def _embedded(model: Decoder) -> Decoder:
    """The model with an embedding as `mmfree train` draws it where no head shares it."""
    model.embed.weight = mx.random.normal(model.embed.weight.shape, scale=EMBEDDING_STD)
    return model
