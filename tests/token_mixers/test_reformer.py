"""Reformer beyond a chunk: what is near, what a step sees, padding, what is refused."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.models.parts.mixers import MixerChoice
from mlx_mmfree.token_mixers import Reformer
from mlx_mmfree.token_mixers.reformer import factors_of, hash_buckets
from tests.tolerances import TOLERANCE, relative_error

SMALL = {"chunk_size": 4, "num_heads": 2, "num_rounds": 3}


@pytest.fixture
def x() -> mx.array:
    return mx.random.normal((2, 30, 16), key=mx.random.key(1))


@pytest.mark.parametrize("convention", ["trax", "transformers", "reformer_pytorch"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_all_is_seen_within_a_chunk(x: mx.array, convention: Any, is_causal: bool) -> None:
    """Against attention with the same scores in NumPy, in float64."""
    options = {"convention": convention, "is_causal": is_causal, "num_heads": 2}
    mixer = Reformer(16, chunk_size=30, **options)
    weights = {
        name: np.array(mixer[f"{name}_proj"].weight, np.float64)
        for name in ("query_key", "value", "output")
    }
    rows = np.array(x, np.float64)
    q, v = (
        (rows @ weights[name].T).reshape(2, 30, 2, 8).swapaxes(1, 2)
        for name in ("query_key", "value")
    )
    eps = 1e-24 if convention == "reformer_pytorch" else 1e-6
    keys = q / np.sqrt(np.square(q).sum(axis=-1, keepdims=True) + 8 * eps)
    scores = q @ keys.swapaxes(-1, -2) * (8**-0.5 if convention == "reformer_pytorch" else 1)
    position = np.arange(30)
    scores = np.where(position == position[:, None], -1e4, scores)
    if is_causal:
        scores = np.where(position > position[:, None], -np.inf, scores)
    attended = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended /= attended.sum(axis=-1, keepdims=True)
    want = (attended @ v).swapaxes(1, 2).reshape(2, 30, 16) @ weights["output"].T
    assert relative_error(mixer(x)[0], mx.array(want)) <= TOLERANCE[mx.float32]


def test_a_step_sees_what_the_end_of_the_text_sees(x: mx.array) -> None:
    mixer = Reformer(16, **SMALL)
    _, state = mixer(x[:, :20])
    for n in range(20, 30):
        y, state = mixer(x[:, n : n + 1], state)
        want = mixer(x[:, : n + 1])[0][:, -1:]
        assert relative_error(y, want) <= TOLERANCE[mx.float32]


def test_a_chunk_sees_what_the_whole_sees(x: mx.array) -> None:
    mixer = Reformer(16, **SMALL)
    _, state = mixer(x[:, :9])
    y, _ = mixer(x[:, 9:], state)
    assert relative_error(y, mixer(x)[0][:, 9:]) <= TOLERANCE[mx.float32]


def test_later_tokens_are_not_weighed(x: mx.array) -> None:
    """Queries decide what is near, so only the values of later tokens are changed."""
    mixer = Reformer(16, **SMALL)
    mixer.query_key_proj.weight = mx.concatenate(
        [mixer.query_key_proj.weight[:, :8], mx.zeros((16, 8))], axis=1
    )
    changed = mx.concatenate([x[:, :20], x[:, 20:] + (mx.arange(16) >= 8)], axis=1)
    y, was = mixer(changed)[0], mixer(x)[0]
    assert mx.array_equal(y[:, :20], was[:, :20])
    assert not mx.array_equal(y[:, 20:], was[:, 20:])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("after", [5, 100])
def test_padding_moves_neither_chunks_nor_buckets(
    x: mx.array, is_causal: bool, before: int, after: int
) -> None:
    mixer = Reformer(16, is_causal=is_causal, **SMALL)
    padded = mx.pad(x, [(0, 0), (before, after), (0, 0)], constant_values=9.0)
    position = mx.arange(padded.shape[1])
    valid = mx.broadcast_to((position >= before) & (position < before + 30), padded.shape[:2])
    y, state = mixer(padded, None, valid)
    assert relative_error(y[:, before : before + 30], mixer(x)[0]) <= TOLERANCE[mx.float32]
    if is_causal:
        step = x[:, :1] + 1
        want = mixer(step, mixer(x)[1])[0]
        assert relative_error(mixer(step, state)[0], want) <= TOLERANCE[mx.float32]


def test_buckets_follow_from_the_longest_text_of_a_model() -> None:
    """Two for each of 16 chunks, however long the text is."""
    choice = MixerChoice("reformer", {"chunk_size": 4, "num_heads": 2})
    mixer = choice.token_mixer(16, linear=nn.Linear, is_causal=True, max_length=64)
    assert isinstance(mixer, Reformer)
    x = mx.random.normal((1, 2000, 16), key=mx.random.key(2))
    assert mixer.buckets(x).max().item() == 31
    assert mx.array_equal(mixer.buckets(x[:, :9]), mixer.buckets(x)[..., :9])


def test_factors_are_digits() -> None:
    x = mx.random.normal((1, 2, 9, 4), key=mx.random.key(3))
    rotations = mx.random.normal((2, 4, 3, 5), key=mx.random.key(4))
    both = hash_buckets(x, rotations, (4, 6))
    low, high = (
        hash_buckets(x, part, (factor,))
        for part, factor in zip(mx.split(rotations, [2], axis=-1), (4, 6), strict=True)
    )
    assert mx.array_equal(both, low + 4 * high)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[Reformer\] 'num_buckets' must be even"):
        Reformer(16, num_buckets=5)
    with pytest.raises(ValueError, match=r"\[Reformer\] 'convention' must be one of 'trax'"):
        Reformer(16, convention="other")  # type: ignore[arg-type]


def test_long_texts_have_two_factors() -> None:
    assert factors_of(13, 64) == (2,)
    assert factors_of(64 * 16, 64) == (32,)
    assert factors_of(64 * 100, 64) == (16, 16)
