"""Sessions in memory: what is found, what it goes on as, and what it takes."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, MMFreeError
from mlx_mmfree.generation import (
    cache_prompt,
    generate_tokens,
    prefill,
    save_prompt_cache,
    with_key_values,
)
from mlx_mmfree.generation.decode import Decoding
from mlx_mmfree.generation.sessions import Known, Sessions
from mlx_mmfree.generation.states import counted, trimmed_state
from mlx_mmfree.models import Decoder, hgrn_bit
from tests.generation.models import MODELS, VOCABULARY, alone, attention, hybrid, recurrent
from tests.generation.sessions.texts import TEXT, arrays, keep, read, same_bits


def sessions_of(model: Decoder, memory_bytes: int = 2**30) -> Sessions:
    return Sessions(model, memory_bytes=memory_bytes)


def stored(model: Decoder, *texts: list[int]) -> Sessions:
    sessions = sessions_of(model)
    keep(sessions, model, *texts)
    return sessions


@pytest.mark.sample(2)
@pytest.mark.parametrize("build", [*MODELS.values(), hybrid], ids=[*MODELS, "hybrid"])
@pytest.mark.parametrize("length", [1, 12, 16])
def test_a_text_goes_on_as_if_it_had_been_read_now(build: Any, length: int) -> None:
    model = build(1)
    known = stored(model, TEXT[:length]).find(TEXT)
    assert known.count == length
    want = read(model, TEXT[:length])
    rest = TEXT[length:]
    assert list(generate_tokens(model, rest, state=known.state, max_tokens=6)) == list(
        generate_tokens(model, rest, state=want, max_tokens=6)
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("build", [recurrent, attention])
def test_bits_and_dtypes_are_kept(build: Any, dtype: mx.Dtype) -> None:
    model = build(1, dtype)
    state = read(model, TEXT)
    known = stored(model, TEXT).find([*TEXT, 1])
    if build is recurrent:
        assert same_bits(known.state, state)
    # there is capacity for more tokens in both
    found, read_before = (trimmed_state(model, each, len(TEXT)) for each in (known.state, state))
    for (_, got), (_, want) in zip(tree_flatten(found), tree_flatten(read_before), strict=True):
        assert got.dtype == want.dtype and mx.array_equal(got, want)


@pytest.mark.parametrize("name", MODELS)
def test_the_longest_prefix_is_found(name: str) -> None:
    model = MODELS[name](1)
    sessions = stored(model, TEXT[:3], TEXT[:9], TEXT[:12], [*TEXT[:9], 1, 1, 1, 1])
    assert [sessions.find(TEXT[:n]).count for n in (3, 4, 9, 10, 12, 13, 17)] == [
        *(0, 3, 3, 9, 9, 12, 12)
    ]
    assert sessions.find([*TEXT[:9], 1, 1, 1, 1, 1]).count == 13
    assert sessions.find([TEXT[0] + 1, *TEXT[1:]]) == Known(0, None)
    assert sessions.find([]) == sessions.find([TEXT[0]]) == Known(0, None)


@pytest.mark.sample(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("recurrent", [4, 9, 13, 16]),
        # not full with 9 tokens
        ("window", [9, 13, 16]),
        ("attention", [16]),
        ("quantised", [16]),
        # exact up to 12 tokens
        ("quantised_later", [9, 16]),
    ],
)
def test_a_state_serves_the_prefixes_that_it_can_be_cut_to(name: str, left: list[int]) -> None:
    model = MODELS[name](1)
    lengths = (4, 9, 13, 16)
    sessions = stored(model, *(TEXT[:n] for n in lengths))
    sizes = [stored(model, TEXT[:n]).stats().memory_bytes for n in left]
    stats = sessions.stats()
    assert (stats.sessions, stats.memory_bytes) == (len(left), sum(sizes))
    for n in lengths:
        known = sessions.find([*TEXT[:n], 3])
        assert known.count == n
        want = read(model, TEXT[:n])
        pairs = zip(counted(model, known.state), counted(model, want), strict=True)
        assert all(mx.array_equal(got, expected).item() for got, expected in pairs)
        rest = [22, 3, 8]
        assert list(generate_tokens(model, rest, state=known.state, max_tokens=6)) == alone(
            model, rest, 6, state=want
        )
        sessions.keep(TEXT[:n], want)
    assert sessions.stats().memory_bytes == stats.memory_bytes


def test_a_prefix_is_served_as_long_as_one_text_serves_it() -> None:
    model = attention(1)
    fork = [*TEXT[:9], 1, 1, 1, 1]
    sessions = sessions_of(model, 2 * stored(model, TEXT).stats().memory_bytes)
    keep(sessions, model, TEXT[:9], fork, TEXT)
    assert sessions.stats().memory_sessions == 2
    sessions.find([*fork, 1])
    keep(sessions, model, TEXT[::-1])
    assert sessions.find([*TEXT, 1]).count == 9
    keep(sessions, model, [3, *TEXT[1:]])
    assert sessions.find([*TEXT, 1]).count == 9
    keep(sessions, model, [4, *TEXT[1:]], [5, *TEXT[1:]])
    assert sessions.find([*TEXT, 1]).count == 0


def test_what_is_found_and_missed_is_counted() -> None:
    sessions = stored(recurrent(1), TEXT[:3], TEXT[:9])
    for text in (TEXT, TEXT[:5], TEXT[:2]):
        sessions.find(text)
    stats = sessions.stats()
    assert (stats.sessions, stats.hits, stats.misses, stats.tokens_saved) == (2, 2, 1, 12)


@pytest.mark.sample(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize("name", MODELS)
def test_a_decoding_does_not_write_to_what_is_kept(name: str) -> None:
    """Neither the one that the state came from, nor those that go on from it."""
    model = MODELS[name](1)

    def begun() -> tuple[Decoding, Sessions]:
        decoding, sessions = Decoding(model, mx.array([TEXT[:12]])), sessions_of(model)
        sessions.keep(TEXT[:12], decoding.state)
        return decoding, sessions

    want = arrays(begun()[1].find(TEXT).state)
    mx.eval(want)
    decoding, sessions = begun()
    for _ in range(8):
        decoding.step()
    first = sessions.find(TEXT).state
    texts = [
        list(generate_tokens(model, [token], state=sessions.find(TEXT).state, max_tokens=9))
        for token in (4, 4, 2)
    ]
    assert texts[0] == texts[1]
    assert same_bits(first, want)
    assert same_bits(sessions.find(TEXT).state, first)


def test_what_was_used_longest_ago_goes_first() -> None:
    model = recurrent(1)
    sizes = stored(model, TEXT[:2]).stats().memory_bytes
    sessions = sessions_of(model, 3 * sizes)
    for n in (2, 3, 4):
        sessions.keep(TEXT[:n], read(model, TEXT[:n]))
    sessions.find(TEXT[:3])
    sessions.keep(TEXT[:3], read(model, TEXT[:3]))
    sessions.keep(TEXT[:5], read(model, TEXT[:5]))
    assert [sessions.find(TEXT[: n + 1]).count for n in (5, 4, 3, 2)] == [5, 3, 3, 2]
    stats = sessions.stats()
    assert (stats.sessions, stats.memory_sessions, stats.memory_bytes) == (3, 3, 3 * sizes)


def test_a_state_larger_than_the_memory_drives_nothing_out() -> None:
    model = attention(1)
    sessions = sessions_of(model, stored(model, TEXT[:4]).stats().memory_bytes)
    for n in (4, 12):
        sessions.keep(TEXT[:n], read(model, TEXT[:n]))
    assert sessions.find(TEXT).count == 4
    empty = sessions_of(model, 0)
    empty.keep(TEXT, read(model, TEXT))
    assert empty.find([*TEXT, 1]) == Known(0, None) and empty.stats().sessions == 0


def test_bytes_are_those_of_the_tokens() -> None:
    """Spare capacity for keys and values does not count, since it is not kept."""

    def added(model: Decoder) -> int:
        one, two = (stored(model, TEXT[:n]).stats().memory_bytes for n in (8, 16))
        return two - one

    # two blocks, keys and values of one head of 32 float32, and an int32 position
    assert added(attention(1)) == 8 * 2 * (2 * 32 * 4 + 4)
    assert added(with_key_values(attention(1), kv_bits=8)) == 8 * 2 * (2 * (32 + 8) + 4)
    assert added(with_key_values(attention(1), max_kv_size=8)) == 0
    assert added(recurrent(1)) == 0


def test_a_thousand_sessions_of_the_smallest_published_model_take_150_mb() -> None:
    config = hgrn_bit.Config(
        vocab_size=50,
        hidden_size=1024,
        num_hidden_layers=24,
        intermediate_size=32,
        linear_class="dense",
    )
    model = hgrn_bit.build(config)
    # nobody waits for weights that do not matter
    for block in model.blocks:
        block.apply(lambda array: mx.zeros((1,), array.dtype))
    sessions = sessions_of(model)
    for n in range(1, 11):
        sessions.keep([n] * n, model.init_state(1))
    stats = sessions.stats()
    assert stats.sessions == 10
    assert 1000 * 24 * 1024 * 4 < 100 * stats.memory_bytes < 150e6


@pytest.mark.parametrize("number", [mx.nan, -mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_state_that_is_not_finite_is_not_kept(dtype: mx.Dtype, number: float) -> None:
    model = attention(1, dtype)
    state = read(model, TEXT)
    largest = mx.finfo(dtype).max
    sessions = sessions_of(model)
    for value, count in ((number, 0), (largest, 1), (-largest, 1)):
        keys = state[0].keys.at[0, 0, 3, 1].add(mx.array(value, dtype))
        sessions.keep(TEXT, (state[0]._replace(keys=keys), *state[1:]))
        assert sessions.stats().sessions == count


@pytest.mark.parametrize("build", [recurrent, attention])
def test_wrong_tokens_and_states_are_refused(build: Any) -> None:
    model = build(1)
    sessions = sessions_of(model)
    both = prefill(model, mx.array([TEXT, TEXT]))
    with pytest.raises(
        ValueError, match="'state' must be the state that the model has after its 17"
    ):
        sessions.keep(TEXT, both)
    with pytest.raises(ValueError, match="'state' must be the state"):
        sessions.keep(TEXT, model.init_state(1)[:1])
    if build is attention:
        with pytest.raises(ValueError, match="'state' must be the state"):
            sessions.keep(TEXT, read(model, TEXT[:-1]))
    for wrong in ([VOCABULARY], [3, -1], [2**40], [2**70]):
        with pytest.raises(ValueError, match="within the model's vocabulary"):
            sessions.keep(wrong, read(model, TEXT[: len(wrong)]))
        with pytest.raises(ValueError, match="within the model's vocabulary"):
            sessions.find(wrong)
    with pytest.raises(ValueError, match=r"must be whole numbers but got 1\.5 at position 1"):
        sessions.find([1, 1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'tokens' must hold at least one id"):
        sessions.keep([], model.init_state(1))
    assert sessions.stats().sessions == 0


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="'memory_bytes' must not be negative but got -1"):
        sessions_of(recurrent(1), -1)


def test_another_model_finds_nothing() -> None:
    """The names of texts hold the model's identity."""
    names = [set(stored(recurrent(seed), TEXT)._store._memory) for seed in (1, 2)]
    assert not names[0] & names[1]


def test_models_share_limits() -> None:
    first, second = recurrent(1), attention(1)
    sessions = stored(first, TEXT)
    other = sessions.for_model(second)
    assert other.find([*TEXT, 1]).count == 0
    keep(other, second, TEXT[:4])
    assert other.find(TEXT).count == 4 and sessions.find(TEXT).count == 0
    assert other.stats() == sessions.stats() and sessions.stats().sessions == 2
    limited = sessions_of(first, stored(first, TEXT).stats().memory_bytes)
    keep(limited, first, TEXT)
    keep(limited.for_model(recurrent(2)), recurrent(2), TEXT)
    assert limited.find([*TEXT, 1]).count == 0 and limited.stats().sessions == 1


def test_a_prompt_cache_is_preloaded(tmp_path: Path) -> None:
    model, file = attention(1), tmp_path / "prompt.safetensors"
    save_prompt_cache(file, model, cache_prompt(model, TEXT))
    sessions = sessions_of(model)
    assert sessions.preload(file) == len(TEXT)
    assert sessions.find([*TEXT, 1]).count == len(TEXT)
    with pytest.raises(CheckpointError, match="must come from the model that goes on with it"):
        sessions_of(attention(2)).preload(file)
    with pytest.raises(MMFreeError, match="'memory_bytes' must be more than 8,840, which '"):
        sessions_of(model, 1000).preload(file)
    with Sessions(model, memory_bytes=1000, folder=tmp_path / "sessions") as sessions:
        sessions.preload(file)
        sessions.flush()
        assert sessions.find([*TEXT, 1]).count == len(TEXT)
