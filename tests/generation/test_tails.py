"""The last tokens in a tail: the same logits and states as where each step writes into the cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.generation import load_prompt_cache, prefill, reader, save_prompt_cache
from mlx_mmfree.generation.prompt_cache import PromptCache
from mlx_mmfree.generation.reader import Reader
from mlx_mmfree.generation.speculative import RewindingReader
from mlx_mmfree.layers.attention.key_values import TailedKeyValueState
from mlx_mmfree.layers.attention.options import KeyValueCache
from mlx_mmfree.models import Decoder
from mlx_mmfree.token_mixers import GQA
from tests.generation.models import MODELS, attention, hybrid
from tests.hub.checkpoints import tiny_of
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
SLOTS = 6
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails of a few slots, as on Metal, where their definition computes."""
    monkeypatch.setattr(reader, "TAIL_SLOTS", SLOTS)
    monkeypatch.setattr(reader, "runs_metal_kernels", lambda: True)


def _number_of_tails(state: Any) -> int:
    return sum(isinstance(each, TailedKeyValueState) for each in state)


def _assert_alike(got: Any, want: Any) -> None:
    for (_, g), (_, w) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        # positions, and codes and scales of quantised keys, are the same
        is_float = mx.issubdtype(g.dtype, mx.floating)
        assert relative_error(g, w) <= FLOAT32 if is_float else mx.array_equal(g, w)


MODELS_WITH_TAILS: dict[str, Callable[[int], Decoder]] = {
    "attention": attention,
    # beside layers with a state of another kind
    "qwen3.5": lambda seed: tiny_of("qwen3_5_text", seed, vocab_size=23, head_dim=32),
    # with layers that see a window
    "maple": lambda seed: tiny_of("maple", seed, vocab_size=23, head_dim=32),
    "gemma": lambda seed: tiny_of(
        "gemma3_text", seed, vocab_size=23, head_dim=32, sliding_window=9
    ),
}
# where a step has no fixed shapes, keys and values take few bits, or the state does not grow
WITHOUT = {name: MODELS[name] for name in ("window", "quantised", "recurrent")}


@pytest.mark.parametrize("name", [*MODELS_WITH_TAILS, *WITHOUT])
def test_logits_and_states_over_three_tails(
    name: str, tails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (MODELS_WITH_TAILS | WITHOUT)[name](1)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "runs_metal_kernels", lambda: False)
        plain = Reader(model, prefill(model, mx.array([PROMPT])))
    tailed = Reader(model, prefill(model, mx.array([PROMPT])))
    for n in range(3 * SLOTS + 2):
        token = mx.array([n * 5 % 23])
        got, want = tailed.read(token)[0], plain.read(token)[0]
        assert relative_error(got, want) <= FLOAT32
        mx.eval(tailed.arrays, plain.arrays)
        if n in (0, SLOTS - 1, SLOTS, 3 * SLOTS + 1):
            _assert_alike(tailed.state, plain.state)
    assert (_number_of_tails(tailed.arrays) > 0) == (name in MODELS_WITH_TAILS)


@pytest.mark.parametrize("window", [{}, {"window": 7}, {"window": 7, "sinks": 2}], ids=str)
@pytest.mark.parametrize("lengths", [[5], [3, 9, 1], [12, 0]], ids=str)
def test_windows_and_rows_of_different_lengths(window: dict[str, int], lengths: list[int]) -> None:
    """The slots of what has left the window are not seen, and a full tail takes them."""
    mixer, batch = GQA(64, num_heads=2, num_kv_heads=1, cache=KeyValueCache(**window)), len(lengths)
    x = mx.random.normal((batch, 12 + 3 * SLOTS, 64))
    valid = mx.arange(12) < mx.array(lengths)[:, None]
    _, state = mixer(x[:, :12], None, valid)
    kind = mixer.state_kind
    fixed, capacity = kind.fixed(state, 3 * SLOTS)
    tailed = kind.with_tail(fixed, SLOTS)
    for n in range(3 * SLOTS):
        token = x[:, 12 + n : 13 + n]
        want, fixed = mixer(token, fixed)
        got, tailed = mixer(token, tailed)
        assert relative_error(got, want) <= FLOAT32
        count = n % SLOTS + 1
        _assert_alike(kind.without_tail(tailed, count), fixed)
        if count == SLOTS:
            tailed = kind.with_tail(kind.without_tail(tailed, count), SLOTS)
    assert capacity is None or capacity >= 3 * SLOTS
    assert isinstance(tailed, TailedKeyValueState)


def test_a_window_that_is_smaller_than_a_tail_has_none() -> None:
    kind = GQA(64, num_heads=2, cache=KeyValueCache(window=SLOTS - 1)).state_kind
    fixed, _ = kind.fixed(kind.blank(1, 3, mx.float32))
    assert kind.with_tail(fixed, SLOTS) is fixed
    assert kind.with_tail(fixed, SLOTS - 1) is not fixed


def test_heads_that_no_kernel_takes_have_none() -> None:
    kind = GQA(40, num_heads=1).state_kind
    fixed, _ = kind.fixed(kind.blank(1, 3, mx.float32))
    assert kind.with_tail(fixed, SLOTS) is fixed


@pytest.mark.parametrize("taken_back", [1, SLOTS - 1, SLOTS, SLOTS + 3])
def test_tokens_are_taken_back_within_a_tail_and_past_it(taken_back: int) -> None:
    mixer = GQA(64, num_heads=2, num_kv_heads=1)
    x = mx.random.normal((2, 9 + SLOTS, 64))
    _, state = mixer(x[:, :9], None, mx.arange(9) >= mx.array([[0], [4]]))
    kind = mixer.state_kind
    fixed, _ = kind.fixed(state, 2 * SLOTS)
    tailed = kind.with_tail(fixed, SLOTS)
    for n in range(SLOTS):
        _, fixed = mixer(x[:, 9 + n : 10 + n], fixed)
        _, tailed = mixer(x[:, 9 + n : 10 + n], tailed)
    fixed, tailed = (kind.rewound(each, taken_back) for each in (fixed, tailed))
    left = max(SLOTS - taken_back, 0)
    assert mx.array_equal(kind.without_tail(tailed, left).positions, fixed.positions)
    want, fixed = mixer(x[:, :1], fixed)
    got, tailed = mixer(x[:, :1], tailed)
    assert relative_error(got, want) <= FLOAT32
    found = kind.without_tail(tailed, left + 1)
    assert mx.array_equal(found.positions, fixed.positions)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_drafts(kind: str, tails: None) -> None:
    """Reads the drafts of a text, some of which are refused, over several tails."""
    model = {"attention": attention, "hybrid": hybrid}[kind](1)
    rewinding = RewindingReader(model, prefill(model, mx.array([PROMPT])), ahead=3)
    one_by_one = Reader(model, prefill(model, mx.array([PROMPT])))
    for n in range(12):
        tokens = [(7 * n + k * k) % 23 for k in range(4)]
        count = 4 - n % 4
        logits, _ = rewinding.read(mx.array(tokens))
        rewinding.take_back(4 - count)
        want = [one_by_one.read(mx.array([token]))[0] for token in tokens[:count]]
        assert relative_error(logits[:count], mx.concatenate(want)) <= FLOAT32
    assert _number_of_tails(rewinding.arrays) == 2
    _assert_alike(_positions(rewinding.state), _positions(one_by_one.state))


def _positions(state: Any) -> list[mx.array]:
    return [each.positions for each in state if hasattr(each, "positions")]


def test_what_was_put_aside_stays_and_is_saved_as_before(tails: None, tmp_path: Path) -> None:
    model = attention(1)
    reading = Reader(model, prefill(model, mx.array([PROMPT])))
    tokens = [n * 5 % 23 for n in range(3 * SLOTS)]
    for token in tokens[: SLOTS + 2]:
        mx.eval(reading.read(mx.array([token])))
    aside = reading.state
    for token in tokens[SLOTS + 2 :]:
        mx.eval(reading.read(mx.array([token])))
    want = prefill(model, mx.array([PROMPT + tokens[: SLOTS + 2]]))
    _assert_alike(aside, want)
    read = tuple(PROMPT + tokens[: SLOTS + 2])
    for name, state in (("tailed", aside), ("plain", want)):
        save_prompt_cache(tmp_path / name, model, PromptCache(read, state))
    got, plain = (load_prompt_cache(tmp_path / name, model) for name in ("tailed", "plain"))
    assert got.tokens == plain.tokens
    _assert_alike(got.state, plain.state)
