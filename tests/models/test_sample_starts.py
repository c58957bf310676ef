"""Rows packed with several samples: a model gives what it gives for each sample alone."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_mmfree.models import Decoder, find
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


MAPLE = {
    key: find("maple").tiny[key]
    for key in ("rope_theta", "layer_types", "num_hidden_layers", "sliding_window", "num_experts")
} | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _build(model_type: str, **keys: Any) -> Decoder:
    mx.random.seed(0)
    module = find(model_type)
    model = module.build(module.config.from_hub(SIZES | keys))
    if "lower_bounds" in model:
        model.lower_bounds = mx.random.normal(model.lower_bounds.shape)
    return model


def _windowed(model: Decoder) -> Decoder:
    """Each token sees the first four of its sample and the last three."""
    for block in model.blocks:
        block.token_mixer = block.token_mixer.with_state(max_size=7)
    return model


MODELS: dict[str, Callable[[], Decoder]] = {
    "hgrn_bit": lambda: _build("hgrn_bit"),
    "hgrn_bit-shared-conv": lambda: _build("hgrn_bit", use_short_conv=True),
    "hgrn_bit-convs": lambda: _build("hgrn_bit", use_short_conv=True, share_conv_kernel=False),
    "hgrn_bit-dense": lambda: _build("hgrn_bit", linear_class="dense"),
    "hgrn": lambda: _build("hgrn"),
    "hgrn2": lambda: _build("hgrn2", expand_ratio=8),
    "gla": lambda: _build("gla"),
    # with small heads, a query and a key that nearly cancel are normed up, and their rounding with them
    "retnet": lambda: _build("retnet", num_heads=2),
    "bitnet": lambda: _build("bitnet", rope_theta=5e5, **HEADS),
    "llama": lambda: _build("llama", **HEADS),
    "llama-window": lambda: _windowed(_build("llama", **HEADS)),
    "qwen3": lambda: _build("qwen3", **HEADS),
    "gemma3_text": lambda: _build(
        "gemma3_text", sliding_window=4, sliding_window_pattern=2, **HEADS
    ),
    "maple": lambda: _build("maple", **{**HEADS, **MAPLE}),
    "minicpm": lambda: _build("minicpm", scale_depth=1.4, dim_model_base=16.0, **HEADS),
}
LENGTHS = [[4, 1, 9, 6], [20], [11, 5]]
TOKENS = mx.random.randint(0, 64, (3, 20), key=mx.random.key(1))


def _samples() -> list[tuple[int, int, int]]:
    """Row, begin and end of each sample."""
    return [
        (row, sum(lengths[:n]), sum(lengths[: n + 1]))
        for row, lengths in enumerate(LENGTHS)
        for n in range(len(lengths))
    ]


def _masks() -> tuple[mx.array, mx.array]:
    starts, valid = mx.zeros((3, 20), mx.bool_), mx.zeros((3, 20), mx.bool_)
    for row, begin, end in _samples():
        starts[row, begin] = True
        valid[row, begin:end] = True
    return valid, starts


def _loss(logits: mx.array, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, tokens, reduction="sum")


def _alone(model: Decoder) -> mx.array:
    tokens = [TOKENS[row : row + 1, begin:end] for row, begin, end in _samples()]
    return sum(_loss(model(sample)[0], sample) for sample in tokens)


def _packed(model: Decoder) -> mx.array:
    valid, starts = _masks()
    logits, _ = model(TOKENS, None, valid, starts=starts)
    parts = [(logits[r : r + 1, a:b], TOKENS[r : r + 1, a:b]) for r, a, b in _samples()]
    return sum(_loss(*part) for part in parts)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_packed_samples_equal_each_alone(name: str) -> None:
    model = MODELS[name]()
    valid, starts = _masks()
    logits, state = model(TOKENS, None, valid, starts=starts)
    for row, begin, end in _samples():
        want, last = model(TOKENS[row : row + 1, begin:end])
        assert relative_error(logits[row : row + 1, begin:end], want) <= FLOAT32
        if end == 20:
            own = tree_map(lambda a, row=row: a[row : row + 1], state)
            following = TOKENS[row : row + 1, :4]
            got_next, want_next = model(following, own)[0], model(following, last)[0]
            assert relative_error(got_next, want_next) <= FLOAT32


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_packed_samples_are_the_sums_of_each_alone(name: str) -> None:
    model = MODELS[name]()
    want_loss, want = nn.value_and_grad(model, _alone)(model)
    got_loss, got = nn.value_and_grad(model, _packed)(model)
    assert relative_error(got_loss, want_loss) <= FLOAT32
    for (path, g), (_, w) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert relative_error(g, w) <= GRADIENT_TOLERANCE, path
