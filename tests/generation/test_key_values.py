"""Models whose attention keeps less of a text."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_reduce

from mlx_mmfree.generation import (
    batch_generate,
    keeps_key_values,
    memory,
    memory_need,
    prefill,
    with_key_values,
)
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder, llama
from tests.generation.models import SETTINGS, alone, attention, recurrent
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.random.randint(0, 23, (1, 40), key=mx.random.key(6))


def _nbytes(state: Any) -> int:
    total: int = tree_reduce(lambda total, array: total + array.nbytes, state, 0)
    return total


def test_only_attention_keeps_keys_and_values() -> None:
    assert keeps_key_values(attention(1))
    assert not keeps_key_values(recurrent(1))
    model = recurrent(1)
    same = with_key_values(model, max_kv_size=9, kv_bits=8)
    assert mx.array_equal(same(TOKENS)[0], model(TOKENS)[0])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_given_model_is_not_changed(settings: dict[str, int]) -> None:
    model = attention(1)
    want = model(TOKENS)[0]
    changed = with_key_values(model, **settings)
    assert changed is not model and changed.config == model.config
    pairs = zip(tree_flatten(changed.parameters()), tree_flatten(model.parameters()), strict=True)
    assert all(a is b for (_, a), (_, b) in pairs)
    assert mx.array_equal(model(TOKENS)[0], want)
    is_same = mx.array_equal(changed(TOKENS)[0], want)
    assert is_same == (not settings)


def test_settings_replace_earlier_ones() -> None:
    model = attention(1, kv_bits=4)
    assert mx.array_equal(with_key_values(model)(TOKENS)[0], attention(1)(TOKENS)[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_chunks_of_the_prompt_do_not_matter(settings: dict[str, int]) -> None:
    model = attention(1, **settings)
    whole = model(TOKENS)[0][:, -1]
    for step_size in (1, 7, 12, 13):
        state = prefill(model, TOKENS[:, :-1], step_size=step_size)
        assert (
            relative_error(model(TOKENS[:, -1:], state)[0][:, -1], whole) <= TOLERANCE[mx.float32]
        )


def test_a_limited_model_forgets_the_middle() -> None:
    model = attention(1, max_kv_size=9)
    middle = mx.where(mx.arange(40) == 15, (TOKENS + 1) % 23, TOKENS)
    first = mx.where(mx.arange(40) == 2, (TOKENS + 1) % 23, TOKENS)
    # two blocks reach back over two windows
    last = model(TOKENS)[0][:, -1]
    assert relative_error(model(middle)[0][:, -1], last) <= TOLERANCE[mx.float32]
    assert relative_error(model(first)[0][:, -1], last) > 0.01
    _, state = model(TOKENS)
    assert all(layer.keys.shape[2] == layer.positions.shape[1] == 9 for layer in state)


@pytest.mark.sample(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_batch_gives_the_texts_of_its_rows(
    settings: dict[str, int], tokenizer: Tokenizer
) -> None:
    mx.random.seed(1)
    config = llama.Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.3,
    )
    # a start in padding would be counted on the longest row
    settings = {name: value for name, value in settings.items() if name != "quantized_kv_start"}
    model = with_key_values(llama.build(config), **settings)
    prompts = [[5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [300]]
    texts = batch_generate(model, tokenizer, prompts, max_tokens=10).tokens
    assert texts == [alone(model, row, 10) for row in prompts]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_memory_of_the_state_is_counted(settings: dict[str, int], batch_size: int) -> None:
    model = attention(1, **settings)
    need = memory_need(model, 0, batch_size=batch_size, context_length=256)
    tokens = mx.zeros((batch_size, 256), mx.int32)
    assert need.state_bytes == _nbytes(prefill(model, tokens))
    assert memory_need(model, 0).state_bytes < need.state_bytes


def test_memory_of_a_published_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """BitNet 2B4T: 30 blocks, 5 heads of 128, keys and values."""
    config = llama.Config(
        vocab_size=64,
        hidden_size=2560,
        num_hidden_layers=30,
        intermediate_size=6912,
        num_attention_heads=20,
        num_key_value_heads=5,
        head_dim=128,
    )
    model = llama.build(config)
    model.embed.weight = model.embed.weight.astype(mx.bfloat16)
    numbers = 30 * 2 * 5 * 128 * 4096
    positions = 30 * 4096 * 4
    on_cpu = memory_need(model, 0, context_length=4096).state_bytes
    assert on_cpu == 2 * numbers + positions
    with monkeypatch.context() as patched:
        patched.setattr(memory, "runs_metal_kernels", lambda: True)
        on_metal = memory_need(model, 0, context_length=4096).state_bytes
    # three tails of 64 tokens of 16 bits, with how many of them are used
    assert on_metal - on_cpu == 3 * 30 * (2 * 2 * 5 * 128 * 64 + 4)
    small = with_key_values(model, kv_bits=4)
    # half a byte, and two bfloat16 for 64 numbers
    need = memory_need(small, 0, context_length=4096).state_bytes
    assert need == numbers // 2 + 4 * numbers // 64 + positions
    limited = with_key_values(model, max_kv_size=512)
    assert memory_need(limited, 0, context_length=4096).state_bytes * 8 == 2 * numbers + positions


def _with_head_dim(head_dim: int) -> Decoder:
    return llama.build(llama.Config(23, 32, 1, 32, 1, 1, head_dim))


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (128, 64), (96, 32), (32, 32)])
def test_groups_fit_the_heads_by_themselves(head_dim: int, group_size: int) -> None:
    (state,) = with_key_values(_with_head_dim(head_dim), kv_bits=8).init_state(1)
    assert state.keys.quantization(head_dim).group_size == group_size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_bits": 7}, "'bits' must be one of 2, 3, 4, 5, 6, 8 but got 7"),
        ({"kv_bits": 8, "kv_group_size": 48}, "'group_size' must be one of 32, 64, 128 but got 48"),
        ({"kv_bits": 8, "kv_group_size": 64}, r"got 64 for 32\. Use 32"),
        ({"max_kv_size": 4}, "'max_size' must be larger than 4"),
        ({"max_kv_size": 2**31}, r"below 2\*\*31 but got"),
        ({"quantized_kv_start": -1}, "'quantization_start' must not be negative"),
    ],
    ids=str,
)
def test_impossible_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_key_values(attention(1), **settings)


@pytest.mark.parametrize("head_dim", [80, 100])
def test_heads_that_no_group_fits_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"for {head_dim}\\. Keep keys and values exact"):
        with_key_values(_with_head_dim(head_dim), kv_bits=8)
