"""Tiny models with every kind of state."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_mmfree.generation import with_key_values
from mlx_mmfree.models import Decoder, hgrn_bit, llama

VOCABULARY = 23


def recurrent(seed: int, dtype: mx.Dtype = mx.float32) -> Decoder:
    mx.random.seed(seed)
    config = hgrn_bit.Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        conv_size=3,
        initializer_range=0.3,
        linear_class="dense",
    )
    model = hgrn_bit.build(config)
    model.set_dtype(dtype)
    return model


def attention(seed: int, dtype: mx.Dtype = mx.float32, **settings: Any) -> Decoder:
    mx.random.seed(seed)
    config = llama.Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.3,
    )
    model = llama.build(config)
    model.set_dtype(dtype)
    return with_key_values(model, **settings)


def hybrid(seed: int) -> Decoder:
    """Blocks whose states are shortened between blocks whose states are kept."""
    model, other = attention(seed), recurrent(seed)
    model.blocks = [model.blocks[0], other.blocks[0], model.blocks[1]]
    return model


SETTINGS: dict[str, dict[str, int]] = {
    "attention": {},
    "window": {"max_kv_size": 9},
    "quantised": {"kv_bits": 8},
    "quantised_window": {"kv_bits": 4, "max_kv_size": 9},
    "quantised_later": {"kv_bits": 8, "quantized_kv_start": 12},
}


def _with(settings: dict[str, int]) -> Callable[[int], Decoder]:
    return lambda seed: attention(seed, **settings)


MODELS: dict[str, Callable[[int], Decoder]] = {
    "recurrent": recurrent,
    **{name: _with(settings) for name, settings in SETTINGS.items()},
}
