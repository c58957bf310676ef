"""The models that are compared: metaformers of equal size, and forms of a MatMul-free model."""

import inspect
from collections.abc import Container, Mapping
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
from mlx_mmfree.models.parts.mixers import token_mixers
from mlx_mmfree.models.parts.stack import Block

from .tasks import Task

DIMS, LAYERS, HEADS, WIDTH = 64, 2, 2, 128
"""`WIDTH` is that of the channel mixer beside the reference."""

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
    "pooling": {"window": 8},
    "reformer": {"chunk_size": 16},
    "sinkhorn": {"block_size": 8},
    "sliding_window_attention": {"window": 16},
}
"""What differs from the defaults: windows shorter than the sequences, keys and values shared by heads,
and room for the gMLP's matrix."""

_KNOWS_ORDER = ("gla", "gmlp", "gru", "hgrn", "hgrn2", "mlgru", "synthesizer")
"""Mixers that tell the order of tokens without a code of positions."""

_SHIFT = {"name": "sliding_window_attention", "window": 2}
"""Brings each token the one before. Many memories cannot, and other models have a short convolution."""

MLGRU_FORMS: dict[str, dict[str, Any]] = {
    "MLGRU": {},
    "no lower bound": {"has_bound": False},
    "sigmoid for the gated norm": {"output_gate": "sigmoid"},
    "float activations": {"quantizes_activations": False},
}


POSITION_FORMS: dict[str, dict[str, Any]] = {
    "rotation": {"positions": "rope"},
    "sinusoidal": {"positions": "sinusoidal"},
    "learned": {"positions": "learned"},
    "none": {"positions": "none"},
}
"""How softmax attention, the reference, is told the order of tokens."""

_FULL = {"name": "multi_head_attention"}
_WINDOW = {"name": "sliding_window_attention", "window": 32}
_SINKS = {"name": "attention_sink", "window": 28, "sinks": 4}
_LEARNED = {"name": "attention_sink", "window": 32, "sinks": 0, "is_learned": True}
SINK_FORMS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "all tokens": (_FULL, {"all tokens": _FULL, "window": _WINDOW, "sinks and window": _SINKS}),
    "window": (_WINDOW, {"window": _WINDOW}),
    "sinks and window": (_SINKS, {"sinks and window": _SINKS}),
    "learned sinks and window": (_LEARNED, {"learned sinks and window": _LEARNED}),
}
"""What a model attends to while it learns, and the mixers that read a long text with its weights."""


def causal_mixers() -> list[str]:
    """The names of the causal mixers but ring attention, which one process computes as the reference."""
    return [
        name for name, mixer in token_mixers().items() if mixer.causal and name != "ring_attention"
    ]


def metaformer(mixer: Mapping[str, Any], task: Task, seed: int, **settings: Any) -> Decoder:
    """A model with fresh weights that has as many parameters as the reference, as near as can be.

    Args:
        mixer: The token mixer: `name`, and options other than those of this comparison.
        task: What it is for.
        seed: Seed of the weights.
        settings: Further keys of the description of the model.
    """
    settings = {"positions": positions_of(mixer["name"]), **settings}
    one, two = (_parameters(_built(mixer, task, width, **settings)) for width in (1, 2))
    size = _parameters(_built({"name": REFERENCE}, task, WIDTH))
    width = 1 + round((size - one) / (two - one))
    if width < 1:
        raise ValueError(f"{mixer['name']} alone has more parameters than the reference.")
    mx.random.seed(seed)
    return _embedded(_built(mixer, task, width, **settings))


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


def _built(mixer: Mapping[str, Any], task: Task, width: int, **settings: Any) -> Decoder:
    mixers = [_SHIFT, mixer] if task.is_shifted else [mixer]
    description = {
        "vocab_size": task.vocab_size,
        "hidden_size": DIMS,
        "num_hidden_layers": LAYERS,
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


def mlgru_form(
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
