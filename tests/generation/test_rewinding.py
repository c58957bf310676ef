"""Tokens that are read and taken back leave no trace, with every kind of state."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation import prefill, reader
from mlx_mmfree.generation.reader import Reader
from mlx_mmfree.generation.speculative import RewindingReader
from mlx_mmfree.generation.states import counted
from mlx_mmfree.layers.attention import key_values as key_value_state
from tests.generation.models import MODELS, hybrid
from tests.tolerances import TOLERANCE, relative_error

# how many tokens each call reads, and how many of them are taken back
ROUNDS = [([4], 0), ([4], 3), ([1, 1, 1], 2), ([2, 1, 1, 1], 1), ([1], 0), ([4], 2)] * 2


ALL: dict[str, Callable[[int], Any]] = {**MODELS, "hybrid": hybrid}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_is_taken_back_leaves_no_trace(
    name: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_state, "GROWTH_STEP", 16)
    if not is_compiled:
        monkeypatch.setattr(reader, "can_compile", lambda: False)
    model, text = ALL[name](1), [3, 1, 4, 1, 5]
    rewinding = RewindingReader(model, prefill(model, mx.array([text])), ahead=4)
    one_by_one = Reader(model, prefill(model, mx.array([text])))
    for number, (lengths, taken_back) in enumerate(ROUNDS):
        added = [(7 * number + n * n) % 23 for n in range(sum(lengths))]
        parts = []
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            logits, finite = rewinding.read(mx.array(added[end - length : end]))
            assert finite.all().item() and logits.shape == (length, model.vocab_size)
            parts.append(logits)
        rewinding.take_back(taken_back)
        count = len(added) - taken_back
        want = [one_by_one.read(mx.array([token]))[0] for token in added[:count]]
        got = mx.concatenate(parts)[:count]
        assert relative_error(got, mx.concatenate(want)) <= TOLERANCE[mx.float32]
    for got, want in zip(
        counted(model, rewinding.state), counted(model, one_by_one.state), strict=True
    ):
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_memory_of_keys_and_values_is_not_copied(name: str) -> None:
    """Nothing but the last state of attention is held while tokens are proposed."""
    model = MODELS[name](1)
    rewinding = RewindingReader(model, prefill(model, mx.array([[3, 1, 4]])), ahead=8)
    for n in range(8):
        rewinding.read(mx.array([n]))
    stretches = [len(trail._stretches) for trail in rewinding._trails]
    assert stretches == [8 if name == "recurrent" else 1] * len(model.blocks)
