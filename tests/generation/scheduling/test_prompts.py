"""Prompts are read in turn, in chunks, and what they share is read once."""

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.models import Decoder
from tests.generation.models import MODELS, VOCABULARY, alone
from tests.generation.scheduling.running import Characters, run, tokens_of

STEP = 8


@pytest.fixture
def model() -> Decoder:
    return MODELS["recurrent"](3)


def scheduler_of(model: Decoder, **options: Any) -> Scheduler:
    return Scheduler(model, Characters(VOCABULARY), prefill_step_size=STEP, **options)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 5 * n * n) % VOCABULARY for n in range(length)]


@pytest.fixture
def read(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each call reads without giving logits."""
    sizes: list[int] = []
    hidden = Decoder.hidden

    def recorded(self: Decoder, tokens: mx.array, *args: Any, **options: Any) -> Any:
        # a step of the texts brings its own arguments
        if "block_arguments" not in options:
            sizes.append(tokens.size)
        return hidden(self, tokens, *args, **options)

    monkeypatch.setattr(Decoder, "hidden", recorded)
    return sizes


def test_a_text_that_is_written_waits_for_one_chunk(model: Decoder, read: list[int]) -> None:
    scheduler = scheduler_of(model)
    text = scheduler.submit(Request([1], max_tokens=40))
    while not scheduler.step():
        pass
    for length in (50, 3, 30):
        scheduler.submit(Request(prompt(length), max_tokens=2))
    while sum(read) < 49 + 2 + 29:
        before = sum(read)
        events = scheduler.step()
        assert 0 < sum(read) - before <= STEP
        assert text in {event.request for event in events}


def test_prompts_take_turns(model: Decoder) -> None:
    scheduler = scheduler_of(model)
    long = [scheduler.submit(Request(prompt(30 * STEP, first), max_tokens=1)) for first in (0, 1)]
    short = scheduler.submit(Request(prompt(STEP), max_tokens=1))
    came: dict[int, int] = {}
    for n in range(100):
        came |= {event.request: n for event in scheduler.step()}
    # both long ones first, then the short one, whose token comes a step later
    assert came[short] == 3
    # neither of the long ones has waited for the other
    assert abs(came[long[0]] - came[long[1]]) <= 1


def test_requests_get_rows_in_their_order(model: Decoder) -> None:
    scheduler = scheduler_of(model, max_rows=2)
    numbers = [scheduler.submit(Request(prompt(n + 2, n), max_tokens=3)) for n in range(7)]
    begun: list[int] = []
    while scheduler.has_work:
        counts = Counter(event.request for event in scheduler.step())
        assert counts.total() <= 2 and set(counts.values()) <= {1}
        begun += [number for number in counts if number not in begun]
    assert begun == numbers


@pytest.mark.parametrize("max_rows", [2, 8])
def test_the_same_prompt_is_read_once(model: Decoder, max_rows: int) -> None:
    request = Request(prompt(20), max_tokens=4)
    scheduler = scheduler_of(model, max_rows=max_rows)
    events = run(scheduler, [request] * 5)
    assert scheduler.tokens_read == 19
    want = alone(model, request.tokens, 4)
    assert [tokens_of(each) for each in events] == [want] * 5
    assert [each[0].cached_tokens for each in events] == [0, 19, 19, 19, 19]


def test_what_prompts_share_up_to_a_breakpoint_is_read_once(model: Decoder) -> None:
    shared = prompt(18)
    requests = [
        Request([*shared, *prompt(n, n)], max_tokens=3, breakpoints=[18]) for n in range(1, 6)
    ]
    scheduler = scheduler_of(model)
    events = run(scheduler, requests)
    assert scheduler.tokens_read == 18 + sum(n - 1 for n in range(1, 6))
    for request, each in zip(requests, events, strict=True):
        assert tokens_of(each) == alone(model, request.tokens, 3)
    assert [each[0].cached_tokens for each in events] == [0, 18, 18, 18, 18]


def test_a_cancelled_prompt_does_not_end_those_who_share_it(model: Decoder) -> None:
    request = Request(prompt(40), max_tokens=2)
    scheduler = scheduler_of(model)
    first, second = scheduler.submit(request), scheduler.submit(request)
    scheduler.step()
    scheduler.cancel(first)
    events = []
    while scheduler.has_work:
        events += scheduler.step()
    assert scheduler.tokens_read == 39
    assert [event.request for event in events] == [second] * 2


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_a_conversation_reads_only_what_is_new(name: str) -> None:
    model = MODELS[name](2)
    sessions = Sessions(model, memory_bytes=10**8)
    first = prompt(20)
    (events,) = run(scheduler_of(model, sessions=sessions), [Request(first, max_tokens=5)])
    answer = [event.token for event in events if event.token is not None]
    again = [*first, *answer, 3, 1, 4]
    other = [*first, 9, 9]
    scheduler = scheduler_of(model, sessions=sessions)
    both = run(scheduler, [Request(again, max_tokens=4), Request(other, max_tokens=4)])
    # the last token of an answer that ends by its length is not read
    assert [each[0].cached_tokens for each in both] == [20 + 4, 20 - 1]
    assert scheduler.tokens_read == len(again) - 1 - 24 + len(other) - 1 - 19
    for tokens, each in zip((again, other), both, strict=True):
        assert tokens_of(each) == alone(model, tokens, 4)


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_a_prompt_is_found_while_its_text_is_written(name: str) -> None:
    model = MODELS[name](2)
    sessions = Sessions(model, memory_bytes=10**8)
    scheduler = scheduler_of(model, sessions=sessions)
    first = prompt(20)
    scheduler.submit(Request(first, max_tokens=30, breakpoints=[7]))
    for _ in range(8):
        scheduler.step()
    later = [[*first[:7], 9, 1], [*first, 2, 2], [*first[:9], 2, 2]]
    events = run(scheduler, [Request(tokens, max_tokens=4) for tokens in later])
    assert [each[0].cached_tokens for each in events] == [7, 19, 7]
    for tokens, each in zip(later, events, strict=True):
        assert tokens_of(each) == alone(model, tokens, 4)


@pytest.mark.parametrize("name", ["recurrent", "attention"])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_mark_is_found_while_the_rest_of_its_prompt_is_read(
    name: str, is_cancelled: bool
) -> None:
    model = MODELS[name](2)
    scheduler = scheduler_of(model, sessions=Sessions(model, memory_bytes=10**8))
    first = prompt(20 * STEP)
    long = scheduler.submit(Request(first, max_tokens=2, breakpoints=[7, 2 * STEP, 19 * STEP]))
    for _ in range(4):
        scheduler.step()
    if is_cancelled:
        scheduler.cancel(long)
    later = [[*first[: 2 * STEP], 9, 1], [*first[: 3 * STEP], 9, 1], [*first[:9], 2, 2]]
    events = run(scheduler, [Request(tokens, max_tokens=4) for tokens in later])
    assert [each[0].cached_tokens for each in events] == [2 * STEP, 2 * STEP, 7]
    for tokens, each in zip(later, events, strict=True):
        assert tokens_of(each) == alone(model, tokens, 4)


@pytest.mark.parametrize(("name", "count"), [("recurrent", 19), ("attention", 25)])
def test_a_request_waits_only_for_states_that_it_goes_on_from(name: str, count: int) -> None:
    """A state that gives no prefix is stored later, when no token waits for it."""
    model = MODELS[name](2)
    sessions = Sessions(model, memory_bytes=10**8)
    scheduler = scheduler_of(model, sessions=sessions)
    scheduler.submit(Request([1], max_tokens=60))
    first = prompt(20)
    other = scheduler.submit(Request(first, max_tokens=6, breakpoints=[7]))
    text: list[int] = []
    while len(text) < 6:
        text += [event.token for event in scheduler.step() if event.request == other]  # type: ignore[misc]
    # what is kept by now are the prompt and its mark
    scheduler.submit(Request([*first[:7], *prompt(5 * STEP)], max_tokens=2))
    scheduler.step()
    assert sessions.find([*first[:7], 22]).count == 7
    assert sessions.find([*first, *text]).count == count


def test_a_prompt_of_one_token_is_no_prefix_of_all_texts() -> None:
    model = MODELS["attention"](2)
    sessions = Sessions(model, memory_bytes=10**8)
    scheduler = scheduler_of(model, sessions=sessions)
    for tokens in ([3], [5, 6]):
        run(scheduler, [Request(tokens, max_tokens=4)])
    assert (sessions.stats().hits, sessions.stats().misses) == (0, 2)


def test_states_are_stored_at_breakpoints_and_where_a_text_ends(model: Decoder) -> None:
    sessions = Sessions(model, memory_bytes=10**8)
    tokens = prompt(20)
    (whole,) = run(scheduler_of(model), [Request(tokens, max_tokens=6)])
    (end,) = tokens_of(whole)[1:2]
    assert end is not None and end != tokens_of(whole)[0]
    request = Request(tokens, max_tokens=6, end={end}, breakpoints=[7, 13])
    scheduler = scheduler_of(model, sessions=sessions)
    run(scheduler, [request])
    written = [*tokens, *tokens_of(whole)[:2]]
    assert [sessions.find([*tokens[:n], 0]).count for n in (6, 7, 12, 13, 18, 19)] == [
        0,
        7,
        7,
        13,
        13,
        19,
    ]
    # what ended it may be left out when it is sent again
    assert sessions.find([*written, 0]).count == len(written) - 1
    # a text that is cancelled is kept as far as it was read
    number = scheduler.submit(Request([5, 5, 5], max_tokens=9))
    shown = [event.token for _ in range(4) for event in scheduler.step()]
    scheduler.cancel(number)
    while scheduler.has_work:
        scheduler.step()
    assert len(shown) == 3
    assert sessions.find([5, 5, 5, *shown, 0]).count == 6


def test_a_prompt_that_cannot_be_read_fails_alone(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Decoder.hidden

    def broken(self: Decoder, tokens: mx.array, *args: Any, **options: Any) -> Any:
        if "block_arguments" not in options and mx.any(tokens == 7).item():
            raise RuntimeError("broken")
        return hidden(self, tokens, *args, **options)

    monkeypatch.setattr(Decoder, "hidden", broken)
    scheduler = scheduler_of(model)
    good, bad = Request([1] * 12, max_tokens=3), Request([*[2] * 12, 7, 1], max_tokens=3)
    (first, failed, last) = run(scheduler, [good, bad, good])
    assert [str(event.error) for event in failed] == ["broken"]
    want = alone(model, good.tokens, 3)
    assert tokens_of(first) == tokens_of(last) == want
