"""Likelihoods of continuations, compared with one text at a time."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.evaluation import score_continuations
from mlx_mmfree.models import Decoder, hgrn_bit, llama

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "initializer_range": 0.5,
}


@pytest.fixture(params=["recurrent", "attention"])
def model(request: pytest.FixtureRequest) -> Decoder:
    mx.random.seed(1)
    if request.param == "recurrent":
        return hgrn_bit.build(hgrn_bit.Config(**SIZES))
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return llama.build(llama.Config(**SIZES, **heads))


def alone(model: Decoder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    logits = np.array(model(mx.array([context + continuation]))[0][0], np.float64)
    logits = logits[len(context) - 1 : -1]
    likelihoods = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    total = likelihoods[np.arange(len(continuation)), continuation].sum()
    return float(total), bool((logits.argmax(1) == continuation).all())


@pytest.mark.equal_bits
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("prefill_step_size", [4, 2048])
def test_batches_equal_texts_alone(model: Decoder, batch_size: int, prefill_step_size: int) -> None:
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 23, n).tolist(), rng.integers(0, 23, m).tolist())
        for n, m in [(1, 1), (9, 2), (3, 8), (1, 12), (5, 1)]
    ]
    # one continuation that is the likeliest
    best = [int(mx.argmax(model(mx.array([pairs[1][0]]))[0][0, -1]).item())]
    pairs.append((pairs[1][0], best))
    done: list[int] = []
    scores = score_continuations(
        model,
        pairs,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
        progress=done.append,
    )
    assert sum(done) == len(pairs)
    for score, pair in zip(scores, pairs, strict=True):
        likelihood, is_greedy = alone(model, *pair)
        assert score.log_likelihood == pytest.approx(likelihood, rel=1e-5, abs=1e-6)
        assert score.is_greedy == is_greedy
    assert scores[-1].is_greedy


def test_refusals(model: Decoder) -> None:
    with pytest.raises(ValueError, match="must have contexts of at least one token"):
        score_continuations(model, [([], [1])])
    with pytest.raises(ValueError, match="must have continuations of at least one token"):
        score_continuations(model, [([1], [2]), ([1], [])])
    with pytest.raises(ValueError, match="within the model's vocabulary"):
        score_continuations(model, [([1], [23])])
    assert score_continuations(model, []) == []


def test_the_start_of_a_long_text_is_left_out() -> None:
    mx.random.seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = llama.build(llama.Config(**SIZES, **heads, max_position_embeddings=8))
    ids = np.random.default_rng(0).integers(0, 23, 40).tolist()
    # a context of 5 and a continuation of 4 are 8 tokens to read: the last is predicted
    for context, continuation in ((5, 4), (6, 4), (30, 4), (1, 8), (30, 8), (30, 1)):
        pair = ids[:context], ids[context : context + continuation]
        [score] = score_continuations(model, [pair])
        context_ids = ids[max(0, context + continuation - 9) : context]
        assert score.log_likelihood == pytest.approx(
            alone(model, context_ids, pair[1])[0], rel=1e-5
        )
    with pytest.raises(ValueError, match=r"continuations of at most 8 tokens, .* but one has 9"):
        score_continuations(model, [([1], ids[:9])])
