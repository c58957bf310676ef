"""Drafts from the text itself: the same tokens, and little that is computed for nothing."""

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation import Chat, make_sampler, stream_generate
from mlx_mmfree.generation.decode import Decoding, DraftStats
from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.generation.speculative import NgramDecoding, RepeatedText
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from tests.generation.models import MODELS, VOCABULARY, Dictation, alone, recurrent
from tests.generation.scheduling.running import Characters, run, tokens_of
from tests.generation.test_chat import PLAIN, with_template
from tests.hub.checkpoints import tiny_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 2
DICTATED = [[3, 1, 4, 1, 5, 7, 2, 6, 3, 1, 4, 1, 5, 9][n % 14] for n in range(80)]


def wasted(stats: DraftStats, tokens: int) -> float:
    """The share of the rows that were computed for nothing."""
    refused = stats.proposed - stats.accepted
    return refused / (tokens + refused)


def decoded(model: Decoder, count: int, **options: Any) -> tuple[list[int], DraftStats]:
    tokens = mx.array([PROMPT], mx.int32)
    decoding = NgramDecoding(model, tokens, RepeatedText(PROMPT), max_tokens=count, **options)
    return [decoding.step()[0] for _ in range(count)], decoding.stats


def test_what_follows_is_what_followed_last() -> None:
    text = RepeatedText([1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 7, 1, 2, 3, 4])
    assert text.following(2) == [6, 0] and text.foreseen == 0
    text.add([6])
    assert text.foreseen == 1 and text.following(3) == [0, 7, 1]
    text.add([9])
    assert text.foreseen == 0 and text.following(3) == []
    assert RepeatedText([1, 2]).following(1) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_the_greedy_one(name: str) -> None:
    model = MODELS[name](1)
    got, _ = decoded(model, 40)
    assert got == alone(model, PROMPT, 40)
    reported = Dictation(tuple(DICTATED), repeats=True)
    got, stats = decoded(model, 80, processors=[reported], num_draft_tokens=5)
    assert got == DICTATED
    assert stats.accepted > 30


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_a_sampled_text_is_the_same(name: str) -> None:
    model, count = MODELS[name](1), 60
    reported = Dictation(tuple(DICTATED), repeats=True, bonus=8)
    options: dict[str, Any] = {
        "sampler": make_sampler(temp=1, top_p=0.99),
        "processors": [reported],
    }
    mx.random.seed(5)
    plain = Decoding(model, mx.array([PROMPT], mx.int32), **options)
    want = [plain.step(is_last=n == count)[0] for n in range(1, count + 1)]
    after = mx.random.uniform(shape=(1,))
    mx.random.seed(5)
    got, stats = decoded(model, count, **options)
    assert got == want
    assert 0 < stats.accepted < stats.proposed
    # the numbers that come next are those that would have come
    assert mx.array_equal(mx.random.uniform(shape=(1,)), after)


def test_little_is_wasted_where_nothing_repeats() -> None:
    """Every run of four recurs, and something else follows it each time."""
    model, numbers = recurrent(1), random.Random(3)
    reported: list[int] = []
    for n in range(100):
        reported += [1, 2, 3, 4, 5 + n % (VOCABULARY - 6), numbers.randrange(VOCABULARY)]
    got, stats = decoded(model, 300, processors=[Dictation(tuple(reported), repeats=True)])
    assert got == reported[:300]
    assert stats.proposed > 5 and wasted(stats, 300) <= 0.03


def test_streams_tell_what_the_drafts_were_worth(model: Decoder, tokenizer: Tokenizer) -> None:
    reported = Dictation(tuple(tokenizer.encode("The dog ran. " * 9)), repeats=True)
    options: dict[str, Any] = {"max_tokens": 40, "processors": [reported]}
    plain = list(stream_generate(model, tokenizer, "The dog", **options))
    drafted = list(stream_generate(model, tokenizer, "The dog", ngram_drafts=True, **options))
    assert [(r.token, r.text, r.finish_reason) for r in drafted] == [
        (r.token, r.text, r.finish_reason) for r in plain
    ]
    stats = drafted[-1].draft
    assert stats is not None and stats.accepted == sum(r.from_draft for r in drafted) > 0
    with pytest.raises(ValueError, match="'ngram_drafts' must be left out with 'draft_model'"):
        next(stream_generate(model, tokenizer, "A", draft_model=model, ngram_drafts=True))
    with pytest.raises(ValueError, match="'num_draft_tokens' must be at least 1"):
        next(stream_generate(model, tokenizer, "A", ngram_drafts=True, num_draft_tokens=0))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["recurrent", "attention"])
@pytest.mark.parametrize("temp", [0.0, 0.005])
def test_texts_of_a_scheduler_stay_what_they_are(name: str, temp: float) -> None:
    model = MODELS[name](1)
    schedulers = [
        Scheduler(model, Characters(VOCABULARY), prefill_step_size=8, ngram_drafts=drafts)
        for drafts in (False, True)
    ]
    sampler = make_sampler(temp)
    texts = []
    for scheduler in schedulers:
        number = scheduler.submit(Request(PROMPT, max_tokens=90, sampler=sampler, seed=7))
        text: list[int | None] = []
        for n in range(200):
            if n in (15, 40):
                scheduler.submit(Request(PROMPT[n % 7 :], max_tokens=5))
            text += [event.token for event in scheduler.step() if event.request == number]
        assert not scheduler.has_work
        texts.append(text)
    assert texts[0] == texts[1] and len(texts[0]) == 90
    assert schedulers[1].draft_stats.accepted > 0 == schedulers[0].draft_stats.proposed


def test_a_text_that_ended_among_drafts_is_known() -> None:
    model = recurrent(1)
    text = alone(model, PROMPT, 60)
    end = next(token for token in text[6:] if token not in text[:6])
    sessions = Sessions(model, memory_bytes=10**8)
    scheduler = Scheduler(model, Characters(VOCABULARY), sessions=sessions, ngram_drafts=True)
    for request in (Request(PROMPT, max_tokens=60, end={end}), Request(PROMPT, max_tokens=33)):
        (events,) = run(scheduler, [request])
        written = [*PROMPT, *(token for token in tokens_of(events) if token is not None)]
        assert sessions.find(written).count == len(written) - 1


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_chats_are_the_same(name: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path / "plain", PLAIN)
    model = tiny_of({"recurrent": "hgrn_bit", "attention": "llama"}[name], 1, vocab_size=640)
    answers = []
    for drafts in (False, True):
        chat = Chat(model, tokenizer, max_tokens=40, ngram_drafts=drafts)
        texts, read = [], []
        for question in ("What is it? What is it?", "Say it again: what is it?", "And now?"):
            responses = list(chat.answer(question))
            texts.append("".join(response.text for response in responses))
            read.append(responses[-1].prompt_tokens)
        # an answer that is stopped among drafts
        with closing(chat.answer("What is it? What is it?")) as stopped:
            texts += [next(stopped).text for _ in range(9)]
        texts += [response.text for response in chat.answer("Go on")]
        answers.append((texts, chat.messages))
        # an answer that was written to its end is not read a second time
        assert all(later < read[0] + 30 for later in read[1:])
    assert answers[0] == answers[1]
