"""The decoding loop against the model run again on the whole text for each token."""

import gc
from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.generation import decode, reader
from mlx_mmfree.generation.decode import Decoding, generate_tokens
from mlx_mmfree.generation.reader import prefill
from mlx_mmfree.layers.attention import key_values as key_value_state
from mlx_mmfree.models import Decoder
from tests.generation.models import MODELS
from tests.tolerances import TOLERANCE, relative_error

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def repeated_forward(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = model(mx.array([tokens]))
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
    return tokens[len(prompt) :]


def test_equals_repeated_forward(model: Decoder) -> None:
    expected = repeated_forward(model, PROMPT, 20)
    assert len(set(expected)) > 5
    assert list(generate_tokens(model, PROMPT, max_tokens=20)) == expected


@pytest.mark.parametrize("step_size", [1, 3, 10, 11, 2048])
def test_prefill_in_chunks_equals_whole(model: Decoder, step_size: int) -> None:
    _, expected = model(mx.array([PROMPT]))
    state = prefill(model, mx.array([PROMPT]), step_size=step_size)
    pairs = zip(tree_flatten(state), tree_flatten(expected), strict=True)
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in pairs)


def test_one_token_prompt(model: Decoder) -> None:
    assert list(generate_tokens(model, [7], max_tokens=6)) == repeated_forward(model, [7], 6)


def test_continues_from_a_state(model: Decoder) -> None:
    state = prefill(model, mx.array([PROMPT[:6]]))
    tokens = generate_tokens(model, PROMPT[6:], state=state, max_tokens=9)
    assert list(tokens) == repeated_forward(model, PROMPT, 9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_state_of_fixed_shapes_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_state, "GROWTH_STEP", 32)
    # capacity for keys and values grows on the way
    model, count = MODELS[name](3), 40
    results = []
    for can_compile in (True, False):
        if not can_compile:
            monkeypatch.setattr(reader, "can_compile", lambda: False)
        decoding = Decoding(model, mx.array([PROMPT, PROMPT[::-1]]))
        early = decoding.state
        tokens = [decoding.step() for _ in range(count)]
        results.append((tokens, early, decoding.state))
    assert len({token for row in tokens for token in row}) > 5
    assert results[0][0] == results[1][0]
    for got, want in zip(results[0][1:], results[1][1:], strict=True):
        pairs = zip(tree_flatten(got), tree_flatten(want), strict=True)
        for (_, a), (_, b) in pairs:
            assert a.shape == b.shape
            if a.size:
                assert relative_error(a, b) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_a_state_is_given_back_with_its_decoding(name: str) -> None:
    model = MODELS[name](3)
    list(generate_tokens(model, PROMPT, max_tokens=3))
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        list(generate_tokens(model, PROMPT, max_tokens=3))
        mx.synchronize()
        assert mx.get_active_memory() <= before + 1000
    finally:
        gc.enable()


def test_prompt_logits_are_not_computed(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    head = type(model).logits

    def recorded(self: Decoder, hidden: mx.array) -> mx.array:
        shapes.append(hidden.shape)
        return head(self, hidden)

    monkeypatch.setattr(type(model), "logits", recorded)
    list(generate_tokens(model, PROMPT, max_tokens=3))
    assert set(shapes) == {(1, 1, 48)}


def test_next_step_is_queued_before_a_token_is_read(model: Decoder) -> None:
    queued = []

    def sampler(logits: mx.array) -> mx.array:
        queued.append(len(read))
        return mx.argmax(logits, axis=-1)

    read: list[int] = []
    for token in generate_tokens(model, PROMPT, sampler=sampler, max_tokens=4):
        read.append(token)
    # The last token starts no further step.
    assert queued == [0, 0, 1, 2]


def test_cache_is_cleared_regularly(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[None] = []
    monkeypatch.setattr(decode, "STEPS_PER_CACHE_CLEARING", 4)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(None))
    list(generate_tokens(model, [1], max_tokens=9))
    assert len(cleared) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": []}, "at least one id"),
        ({"tokens": [1, 518]}, "518 at position 1"),
        ({"tokens": [-1]}, "-1 at position 0"),
        ({"tokens": [1.5]}, "whole numbers"),
        ({"max_tokens": 0}, "'max_tokens' must be at least 1 but got 0"),
        ({"prefill_step_size": 0}, "'prefill_step_size' must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_at_once(
    model: Decoder, arguments: dict[str, object], message: str
) -> None:
    call: Callable[..., object] = generate_tokens
    with pytest.raises(ValueError, match=message):
        call(model, **{"tokens": PROMPT} | arguments)


def test_progress_of_reading(model: Decoder) -> None:
    reported: list[tuple[int, int]] = []
    Decoding(
        model,
        mx.array([[*range(1, 10)]]),
        prefill_step_size=3,
        progress=lambda *counts: reported.append(counts),
    )
    assert reported == [(0, 8), (3, 8), (6, 8), (8, 8)]
