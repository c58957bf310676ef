"""Speculative decoding: the same text, the same distribution, with every kind of state."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.generation import (
    DraftStats,
    generate_tokens,
    make_processors,
    make_sampler,
    stream_generate,
    with_key_values,
)
from mlx_mmfree.generation.sampling import Draw, greedy
from mlx_mmfree.generation.speculative import (
    SpeculativeDecoding,
    accept_drawn,
    check_draft_tokenizer,
)
from mlx_mmfree.hub import Tokenizer, load_tokenizer
from mlx_mmfree.models import Decoder, llama
from tests.generation.conftest import GOLDENS
from tests.generation.models import MODELS, VOCABULARY, alone, attention, recurrent

PROMPT = [3, 1, 4, 1, 5]


def nearly(model: Decoder, seed: int) -> Decoder:
    """A draft that is often right: the model with its head moved a little."""
    draft = with_key_values(model)
    mx.random.seed(seed)
    noise = mx.random.normal(model.head.weight.shape) * 0.12 * model.head.weight.std()
    draft.head = type(model.head)(*reversed(model.head.weight.shape), bias=False)
    draft.head.weight = model.head.weight + noise
    return draft


def speculated(model: Decoder, draft: Decoder, count: int, **options: Any) -> tuple[Any, Any]:
    prompt = mx.array([PROMPT], mx.int32)
    decoding = SpeculativeDecoding(model, draft, prompt, **options)
    tokens = [decoding.step(is_last=n == count)[0] for n in range(1, count + 1)]
    return tokens, decoding.stats


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_the_text_is_the_greedy_one(name: str, num_draft_tokens: int) -> None:
    model = MODELS[name](1)
    want = alone(model, PROMPT, 24)
    rates = {}
    drafts = {"same": model, "near": nearly(model, 3), "other": recurrent(7)}
    for kind, draft in drafts.items():
        got, stats = speculated(model, draft, 24, num_draft_tokens=num_draft_tokens)
        assert got == want, kind
        rates[kind] = stats.acceptance_rate
    assert rates["same"] == 1.0
    assert 0.3 < rates["near"] < 1.0
    assert rates["other"] < 0.5


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_penalties_see_what_was_proposed(name: str) -> None:
    model = MODELS[name](1)
    processors = make_processors(1.4, 6, presence_penalty=0.2, frequency_penalty=0.3)
    want = alone(model, PROMPT, 40, processors=processors)
    assert want != list(generate_tokens(model, PROMPT, max_tokens=40))
    got, stats = speculated(model, nearly(model, 9), 40, processors=processors)
    assert got == want
    assert 0 < stats.accepted < stats.proposed


@pytest.mark.equal_bits
def test_a_state_given_is_continued() -> None:
    for model in (recurrent(1), attention(1)):
        _, state = model(mx.array([[7, 8, 9]]))
        want = alone(model, PROMPT, 20, state=state)
        got, _ = speculated(model, nearly(model, 9), 20, state=state)
        assert got == want


def _distance(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square per degree of freedom of counts against expected ones, rare cells merged."""
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    rare = expected < 8
    cells = [*zip(counts[~rare], expected[~rare], strict=True)]
    if rare.any():
        cells.append((counts[rare].sum(), expected[rare].sum() + 1e-9))
    return sum((c - e) ** 2 / e for c, e in cells) / (len(cells) - 1)


@pytest.mark.parametrize(
    ("closeness", "options"), [(0.5, {"temp": 1.0}), (2.0, {"temp": 0.7, "top_k": 3})], ids=str
)
def test_what_is_kept_and_drawn_has_the_models_distribution(
    options: dict[str, Any], closeness: float
) -> None:
    """The first two tokens of many rounds, against the products of the model's probabilities."""
    sampler, size, draws = make_sampler(**options), 4, 400
    assert isinstance(sampler, Draw)
    rng = np.random.default_rng(0)
    first = mx.array(rng.normal(size=(1, size)) * 1.5)
    second = mx.array(rng.normal(size=(size, size)) * 1.5)
    noise = mx.array(rng.normal(size=(size, size)) * closeness)
    mx.random.seed(4)
    p1 = np.asarray(mx.softmax(sampler.scores(first), axis=-1), np.float64)[0]
    p2 = np.asarray(mx.softmax(sampler.scores(second), axis=-1), np.float64)
    ones, pairs, accepted_sum = np.zeros(size), np.zeros((size, size)), 0
    results = []
    for _ in range(draws):
        q1 = sampler.scores(first + noise[:1])
        d1 = mx.random.categorical(q1)
        q2 = sampler.scores(second[d1] + noise[d1])
        d2 = mx.random.categorical(q2)
        target = mx.concatenate([first, second[d1], second[d2]])
        drafts = [d1.astype(mx.int32), d2.astype(mx.int32)]
        accepted, new = accept_drawn(sampler.scores(target), [q1, q2], drafts)
        results.append(mx.concatenate([accepted, new, *drafts]))
    for accepted, new, d1, d2 in mx.stack(results).tolist():
        accepted_sum += accepted
        text = [*[d1, d2][:accepted], new]
        ones[text[0]] += 1
        if len(text) > 1:
            pairs[text[0], text[1]] += 1
    assert 0.1 * draws < accepted_sum < 1.95 * draws
    assert _distance(ones, draws * p1) < 2.2
    # the second token, given the first, whichever were proposed
    expected = pairs.sum(axis=1, keepdims=True) * p2
    assert _distance(pairs.ravel(), expected.ravel()) < 2.2


@pytest.mark.exhaustive
def test_sampled_texts_have_the_models_distribution() -> None:
    """Whole texts: counts of the first and the second token against exact probabilities."""
    model, sampler = recurrent(1), make_sampler(temp=0.6, top_k=4)
    assert isinstance(sampler, Draw)

    def following(tokens: list[int]) -> np.ndarray:
        logits = model(mx.array([tokens]))[0][:, -1]
        return np.asarray(mx.softmax(sampler.scores(logits), axis=-1), np.float64)[0]

    p1 = following(PROMPT)
    p2 = sum(p1[t] * following([*PROMPT, int(t)]) for t in np.flatnonzero(p1))
    mx.random.seed(2)
    draft, counts = nearly(model, 9), np.zeros((2, VOCABULARY))
    draws, stats = 150, DraftStats()
    for _ in range(draws):
        tokens, stats = speculated(model, draft, 2, sampler=sampler, num_draft_tokens=2)
        counts[[0, 1], tokens] += 1
    assert stats.proposed == 2
    assert counts[0][p1 == 0].sum() == 0
    assert _distance(counts[0], draws * p1) < 3
    assert _distance(counts[1], draws * p2) < 3


def test_equal_models_keep_every_token_they_draw() -> None:
    mx.random.seed(0)
    model = attention(1)
    _, stats = speculated(model, model, 40, sampler=make_sampler(temp=1.0))
    assert stats.acceptance_rate > 0.95


def test_any_other_sampler_chooses_itself() -> None:
    model = recurrent(1)

    def second_best(logits: mx.array) -> mx.array:
        return mx.argsort(-logits, axis=-1)[:, 1]

    want = list(generate_tokens(model, PROMPT, max_tokens=20, sampler=second_best))
    assert want != list(generate_tokens(model, PROMPT, max_tokens=20, sampler=greedy))
    got, _ = speculated(model, nearly(model, 9), 20, sampler=second_best)
    assert got == want


def test_stream_tells_what_the_draft_was_worth(model: Decoder, tokenizer: Tokenizer) -> None:
    plain = list(stream_generate(model, tokenizer, "The dog", max_tokens=12))
    drafted = list(stream_generate(model, tokenizer, "The dog", max_tokens=12, draft_model=model))
    assert [r.token for r in drafted] == [r.token for r in plain]
    assert [r.text for r in drafted] == [r.text for r in plain]
    assert plain[-1].draft is None and not any(r.from_draft for r in plain)
    assert [r.from_draft for r in drafted] == [True, True, True, False] * 3
    assert drafted[-1].draft == DraftStats(9, 9)
    assert DraftStats().acceptance_rate == 0


def test_vocabularies_must_agree(tokenizer: Tokenizer) -> None:
    config = llama.Config(24, 32, 1, 32, 2, 1, 16)
    with pytest.raises(ValueError, match="vocabulary of 23 tokens but has 24"):
        speculated(recurrent(1), llama.build(config), 1)
    with pytest.raises(ValueError, match="'num_draft_tokens' must be at least 1 but got 0"):
        speculated(recurrent(1), recurrent(1), 1, num_draft_tokens=0)
    check_draft_tokenizer(tokenizer, tokenizer)
    other = load_tokenizer(GOLDENS / "tokenizer_spm")
    with pytest.raises(ValueError, match="must come with the tokenizer of the model but it has"):
        check_draft_tokenizer(tokenizer, other)


def test_tokens_must_have_the_same_texts(tokenizer: Tokenizer) -> None:
    class Renamed:
        vocab_size = tokenizer.vocab_size

        def id_to_piece(self, token: int) -> str:
            return "other" if token == 300 else tokenizer.id_to_piece(token)

    with pytest.raises(ValueError, match="token 300 is 'other', not "):
        check_draft_tokenizer(tokenizer, Renamed())
