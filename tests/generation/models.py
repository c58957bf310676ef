"""Tiny models with every kind of state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_mmfree.generation import generate_tokens, with_key_values
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import Decoder, find, hgrn_bit, llama
from tests.hub.checkpoints import tiny_of
from tests.tolerances import TOLERANCE

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


def delta_rule(seed: int, kind: str) -> Decoder:
    """A model of an architecture whose state forgets by keys, or decays in Mamba-2."""
    return tiny_of(kind, seed, vocab_size=VOCABULARY)


def delta_rule_with_attention(seed: int) -> Decoder:
    """Layers whose states are kept beside layers whose states are shortened."""
    return tiny_of("qwen3_5_text", seed, vocab_size=VOCABULARY, initializer_range=0.1)


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


def experts(seed: int) -> Decoder:
    """Maple, with layers that see a window and one that sees all."""
    mx.random.seed(seed)
    architecture = find("maple")
    keys = {**architecture.tiny, "vocab_size": VOCABULARY, "initializer_range": 0.3}
    model: Decoder = architecture.build(architecture.config.from_hub(keys))
    return model


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


DELTA_RULES = ("delta_net", "gated_deltanet", "kda", "rwkv7", "mamba2")

MODELS: dict[str, Callable[[int], Decoder]] = {
    "recurrent": recurrent,
    "experts": experts,
    **{kind: partial(delta_rule, kind=kind) for kind in DELTA_RULES},
    "qwen3_5_text": delta_rule_with_attention,
    **{name: _with(settings) for name, settings in SETTINGS.items()},
}


def alone(model: Decoder, tokens: Sequence[int], count: int, **options: Any) -> list[int]:
    """The greedy text of a prompt that is read and written by itself.

    A dense product may round a row otherwise beside others. So texts of dense models are compared only
    where every token leads by more than rounding; where one does not, a test needs another prompt.
    """
    is_exact = all(each.is_ternary or each.is_embedding for each in matrices(model).values())

    def leading(logits: mx.array) -> mx.array:
        second, best = (mx.sort(logits, axis=-1)[..., n] for n in (-2, -1))
        rounding = 2 * TOLERANCE[mx.float32] * mx.abs(logits).max(axis=-1)
        assert is_exact or (best - second > rounding).all().item()
        return mx.argmax(logits, axis=-1)

    return list(generate_tokens(model, tokens, max_tokens=count, sampler=leading, **options))


@dataclass(frozen=True)
class Dictation:
    """A processor of logits that makes given tokens the likeliest, one after the other.

    Attributes:
        tokens: The tokens. After them, the last one follows again and again.
        repeats: Whether all of them begin again instead.
        bonus: What is added to their logits.
    """

    tokens: tuple[int, ...]
    repeats: bool = False
    bonus: float = 1e6

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        return mx.zeros((tokens.shape[0], 1), mx.int32)

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        count = len(self.tokens)
        index = state % count if self.repeats else mx.minimum(state, count - 1)
        is_wanted = mx.arange(logits.shape[-1]) == mx.array(self.tokens)[index]
        return mx.where(is_wanted, logits + self.bonus, logits)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return state + 1
