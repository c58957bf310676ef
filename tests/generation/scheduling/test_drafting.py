"""A text that is alone is written with a draft model, and stays what it is."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_mmfree.errors import NumericalError
from mlx_mmfree.generation import make_processors, make_sampler
from mlx_mmfree.generation.decode import DraftStats
from mlx_mmfree.generation.scheduling import Event, Request, Scheduler
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.models import Decoder
from tests.generation.models import MODELS, VOCABULARY, alone, attention, recurrent
from tests.generation.scheduling.running import Characters, run, tokens_of

PROMPT = [(5 * n * n) % VOCABULARY for n in range(20)]


def scheduler_of(model: Decoder, draft: Decoder, sessions: Sessions | None = None) -> Scheduler:
    return Scheduler(
        model,
        Characters(VOCABULARY),
        prefill_step_size=8,
        sessions=sessions,
        draft_model=draft,
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_text_stays_what_it_is(name: str) -> None:
    model = MODELS[name](1)
    want = alone(model, PROMPT, 30)
    for draft in (model, recurrent(7)):
        scheduler = scheduler_of(model, draft)
        for _ in range(2):
            (events,) = run(scheduler, [Request(PROMPT, max_tokens=30)])
            assert tokens_of(events) == want
        assert scheduler.draft_stats.proposed > 12
    # the same model is right wherever it is asked
    scheduler = scheduler_of(model, model)
    run(scheduler, [Request(PROMPT, max_tokens=30)])
    assert scheduler.draft_stats.acceptance_rate == 1


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_other_texts_come_and_go(name: str) -> None:
    model = MODELS[name](1)
    scheduler = scheduler_of(model, model)
    events: dict[int, list[Event]] = {}
    requests = [Request(PROMPT, max_tokens=60)]
    events[scheduler.submit(requests[0])] = []
    seen = [0]
    for n in range(60):
        if n in (8, 9, 24):
            requests.append(Request(PROMPT[n % 7 :], max_tokens=5))
            events[scheduler.submit(requests[-1])] = []
        for event in scheduler.step():
            events[event.request].append(event)
        seen.append(scheduler.draft_stats.proposed)
    assert not scheduler.has_work
    for request, each in zip(requests, events.values(), strict=True):
        assert tokens_of(each) == alone(model, list(request.tokens), request.max_tokens)
    # it proposes, waits for the other texts, and proposes again
    assert 0 < seen[8] == seen[12] < seen[24] < seen[-1]


def test_only_plain_greedy_texts_are_drafted() -> None:
    model = recurrent(1)
    scheduler = scheduler_of(model, model)
    for request in (
        Request(PROMPT, max_tokens=12, sampler=make_sampler(temp=0.5), seed=1),
        Request(PROMPT, max_tokens=12, processors=make_processors(repetition_penalty=2.0)),
        Request(PROMPT, max_tokens=12, top_logprobs=1),
    ):
        run(scheduler, [request])
    assert scheduler.draft_stats == DraftStats()


def test_what_was_written_is_kept() -> None:
    model = recurrent(1)
    sessions = Sessions(model, memory_bytes=10**8)
    scheduler = scheduler_of(model, model, sessions)
    (events,) = run(scheduler, [Request(PROMPT, max_tokens=24)])
    assert scheduler.draft_stats.accepted > 4
    text = [*PROMPT, *(event.token for event in events if event.token is not None)]
    known = sessions.find([*text, 0]).count
    # a text that ends among accepted tokens is known up to its prompt's end alone
    assert known in (len(text) - 1, len(PROMPT) - 1)
    (again,) = run(scheduler, [Request([*text, 1, 2], max_tokens=6)])
    assert again[0].cached_tokens == known
    assert tokens_of(again) == alone(model, [*text, 1, 2], 6)
    # as far as it was shown, where it is cancelled
    number = scheduler.submit(Request([4, 2], max_tokens=50))
    shown = [event.token for _ in range(9) for event in scheduler.step()]
    scheduler.cancel(number)
    while scheduler.has_work:
        assert not scheduler.step()
    assert sessions.find([4, 2, *(token for token in shown if token is not None), 0]).count == (
        2 + len(shown) - 1
    )


def test_what_was_read_beyond_the_end_is_taken_back() -> None:
    model = attention(1)
    text = alone(model, PROMPT, 24)
    # a token that the draft model proposes with others
    end = next(token for token in text[16:] if token not in text[:16])
    sessions = Sessions(model, memory_bytes=10**8)
    scheduler = scheduler_of(model, model, sessions)
    (events,) = run(scheduler, [Request(PROMPT, max_tokens=40, end={end})])
    assert scheduler.draft_stats.accepted > 4
    written = [*PROMPT, *(event.token for event in events if event.token is not None)]
    assert written[-1] == end
    assert sessions.find(written).count == len(written) - 1


@pytest.mark.parametrize("build", [recurrent, attention])
def test_a_prompt_is_found_while_its_text_is_drafted(build: Callable[[int], Decoder]) -> None:
    model = build(1)
    scheduler = scheduler_of(model, model, Sessions(model, memory_bytes=10**8))
    scheduler.submit(Request(PROMPT, max_tokens=60))
    while not scheduler.draft_stats.accepted:
        scheduler.step()
    (events,) = run(scheduler, [Request([*PROMPT, 1, 2], max_tokens=4)])
    assert events[0].cached_tokens == len(PROMPT) - 1
    assert tokens_of(events) == alone(model, [*PROMPT, 1, 2], 4)


def test_a_text_that_ends_as_it_is_passed_over_is_kept() -> None:
    # so short that the draft model has caught up at once
    model, prompt = recurrent(1), PROMPT[:6]
    sessions = Sessions(model, memory_bytes=10**8)
    scheduler = scheduler_of(model, model, sessions)
    (first,) = alone(model, prompt, 1)
    (events,) = run(scheduler, [Request(prompt, max_tokens=24, end={first})])
    assert tokens_of(events) == [first] and scheduler.draft_stats == DraftStats()
    text = [*prompt, first, 1, 2]
    (again,) = run(scheduler, [Request(text, max_tokens=6)])
    assert again[0].cached_tokens == len(prompt)
    assert tokens_of(again) == alone(model, text, 6)


def test_a_failure_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = recurrent(1), recurrent(1)
    scheduler = scheduler_of(model, draft)
    number = scheduler.submit(Request(PROMPT, max_tokens=50))
    while not scheduler.draft_stats.proposed:
        scheduler.step()
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: logits(self, x) * mx.nan)
    mx.disable_compile()
    try:
        events = scheduler.step()
    finally:
        mx.enable_compile()
    monkeypatch.undo()
    while scheduler.has_work:
        events += scheduler.step()
    assert [event.request for event in events if event.error] == [number]
    assert isinstance(events[-1].error, NumericalError)
    assert tokens_of(run(scheduler, [Request(PROMPT, max_tokens=5)])[0]) == alone(model, PROMPT, 5)


def test_bad_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="'num_draft_tokens' must be at least 1"):
        Scheduler(recurrent(1), Characters(VOCABULARY), num_draft_tokens=0)
