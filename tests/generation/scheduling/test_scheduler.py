"""Many requests at once: each gets what it gets alone."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.errors import NumericalError
from mlx_mmfree.generation import (
    batch_generate,
    generate_tokens,
    make_processors,
    make_sampler,
)
from mlx_mmfree.generation.sampling import greedy
from mlx_mmfree.generation.scheduling import Event, Request, Scheduler
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.token_mixers.gmlp import GMLP
from tests.generation.models import MODELS, VOCABULARY, alone, attention
from tests.generation.scheduling.running import Characters, random_prompt, run, tokens_of


def check_joining_and_leaving(model: Decoder, tokenizer: Any, count: int) -> None:
    """Random requests come while others are written, and get what they get alone."""
    numbers = random.Random(1)
    requests = [
        Request(random_prompt(numbers, model), max_tokens=numbers.randint(1, 12))
        for _ in range(count)
    ]
    scheduler = Scheduler(model, tokenizer, max_rows=5, prefill_step_size=16)
    tokens: dict[int, list[int | None]] = {}
    unsent = list(requests)
    while scheduler.has_work or unsent:
        if unsent and numbers.random() < 0.4:
            tokens[scheduler.submit(unsent.pop(0))] = []
        for event in scheduler.step():
            tokens[event.request].append(event.token)
    for request, got in zip(requests, tokens.values(), strict=True):
        assert got == alone(model, request.tokens, request.max_tokens)


def test_requests_that_join_and_leave_get_what_they_get_alone(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    check_joining_and_leaving(model, tokenizer, 24)


@pytest.mark.sample(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize("name", MODELS)
def test_whatever_the_state(name: str) -> None:
    check_joining_and_leaving(MODELS[name](1), Characters(VOCABULARY), 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"quantized_kv_start": 5},
        {"quantized_kv_start": 12},
        {"max_kv_size": 9, "quantized_kv_start": 7},
    ],
    ids=str,
)
def test_each_text_is_quantised_at_its_own_length(settings: dict[str, int]) -> None:
    """So few bits change most texts."""
    model = attention(2, kv_bits=2, **settings)
    check_joining_and_leaving(model, Characters(VOCABULARY), 16)
    numbers = random.Random(4)
    requests = [Request(random_prompt(numbers, model), max_tokens=4) for _ in range(16)]
    # prompts that came together are read together
    scheduler = Scheduler(model, Characters(VOCABULARY), prefill_step_size=256)
    for request, events in zip(requests, run(scheduler, requests), strict=True):
        assert tokens_of(events) == alone(model, request.tokens, 4)


def test_drawn_texts_do_not_depend_on_neighbours(model: Decoder, tokenizer: Tokenizer) -> None:
    numbers = random.Random(2)
    samplers = [
        make_sampler(temp=0.9),
        make_sampler(temp=0.9, top_p=0.8),
        make_sampler(temp=1.2, top_k=20, xtc_probability=0.5, xtc_threshold=0.01),
    ]
    penalties = [make_processors(repetition_penalty=1.5), make_processors(presence_penalty=1.0), []]
    requests = [
        Request(
            random_prompt(numbers, model),
            max_tokens=8,
            seed=n,
            sampler=samplers[n % 3],
            processors=penalties[n // 3 % 3],
        )
        for n in range(12)
    ]
    alone = [run(Scheduler(model, tokenizer), [request])[0] for request in requests]
    together = run(Scheduler(model, tokenizer), requests)
    turned = run(Scheduler(model, tokenizer, max_rows=4), requests[::-1])[::-1]
    for want, *others in zip(alone, together, turned, strict=True):
        assert len(want) == 8
        assert [tokens_of(other) for other in others] == [tokens_of(want)] * 2
    other_seed = run(Scheduler(model, tokenizer), [replace(requests[0], seed=99)])[0]
    assert tokens_of(other_seed) != tokens_of(alone[0])


def test_each_token_is_drawn_anew(model: Decoder, tokenizer: Tokenizer) -> None:
    request = Request([1], max_tokens=20, seed=1, sampler=make_sampler(temp=1e6))
    (events,) = run(Scheduler(model, tokenizer), [request])
    # twenty of 518 tokens that are equally likely
    assert len(set(tokens_of(events))) > 15


def test_a_failure_ends_one_request(model: Decoder, tokenizer: Tokenizer) -> None:
    class Broken:
        def start(self, tokens: mx.array, valid: object, vocab_size: int) -> mx.array:
            return mx.zeros((1,), mx.int32)

        def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
            return logits

        def update(self, state: mx.array, tokens: mx.array) -> mx.array:
            raise RuntimeError("broken")

    good = Request([3, 1, 4], max_tokens=6)
    events = run(Scheduler(model, tokenizer), [good, replace(good, processors=[Broken()]), good])
    want = list(generate_tokens(model, [3, 1, 4], max_tokens=6))
    assert tokens_of(events[0]) == tokens_of(events[2]) == want
    assert tokens_of(events[1]) == [want[0], None]
    assert str(events[1][-1].error) == "broken"


def test_logits_that_are_not_finite_end_one_request(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = random.Random(3)
    requests = [Request(random_prompt(numbers, model), max_tokens=6) for _ in range(3)]
    want = [list(generate_tokens(model, r.tokens, max_tokens=6)) for r in requests]
    poisoned = want[1][2]
    hidden = Decoder.hidden

    def broken(self: Decoder, tokens: mx.array, *args: object, **options: object) -> object:
        y, state = hidden(self, tokens, *args, **options)  # type: ignore[arg-type]
        return mx.where((tokens == poisoned)[..., None], mx.nan, y), state

    monkeypatch.setattr(Decoder, "hidden", broken)
    for row, events in zip(want, run(Scheduler(model, tokenizer), requests), strict=True):
        stop = row.index(poisoned) + 1 if poisoned in row[:-1] else len(row)
        if stop == len(row):
            assert tokens_of(events) == row
        else:
            assert tokens_of(events) == [*row[:stop], None]
            assert isinstance(events[-1].error, NumericalError)
    assert poisoned in want[1]


def test_cancelling_frees_the_row_at_the_next_step(model: Decoder, tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(model, tokenizer, max_rows=1)
    first = scheduler.submit(Request([5, 6], max_tokens=50))
    second = scheduler.submit(Request([7, 8], max_tokens=3))
    third = scheduler.submit(Request([7, 8], max_tokens=3))
    while not scheduler.step():
        pass
    scheduler.cancel(first)
    scheduler.cancel(third)
    events = scheduler.step()
    while scheduler.has_work:
        events += scheduler.step()
    assert {event.request for event in events} == {second}
    assert tokens_of(events) == list(generate_tokens(model, [7, 8], max_tokens=3))


def test_no_event_follows_a_cancelled_request(model: Decoder, tokenizer: Tokenizer) -> None:
    for steps in range(6):
        scheduler = Scheduler(model, tokenizer)
        number = scheduler.submit(Request([5, 6], max_tokens=3))
        other = scheduler.submit(Request([7, 8], max_tokens=3))
        for _ in range(steps):
            scheduler.step()
        scheduler.cancel(number)
        while scheduler.has_work:
            assert {event.request for event in scheduler.step()} <= {other}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "'prompt' must not be empty"),
        ({"tokens": [10**6]}, "1000000 at position 0"),
        ({"max_tokens": 0}, "'max_tokens' must be at least 1"),
        ({"top_logprobs": -1}, "'top_logprobs' must be between 0"),
        ({"breakpoints": [4]}, "'breakpoints' must lie between 1 and 3"),
    ],
)
def test_bad_requests_are_refused(
    model: Decoder, tokenizer: Tokenizer, change: dict[str, object], message: str
) -> None:
    scheduler = Scheduler(model, tokenizer)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(replace(Request([1, 2, 3]), **change))  # type: ignore[arg-type]
    assert not scheduler.has_work


def test_requests_of_every_kind_get_what_they_get_alone() -> None:
    model, tokenizer = MODELS["recurrent"](4), Characters(VOCABULARY)
    numbers = random.Random(5)
    samplers = [greedy, make_sampler(temp=0.8), make_sampler(temp=1.5, top_p=0.9, min_p=0.02)]
    penalties = [(), make_processors(repetition_penalty=1.3), make_processors(1, 20, 0.4, 0.2)]
    prompts = [random_prompt(numbers, model, longest=20) for _ in range(30)]
    requests = [
        Request(
            numbers.choice(prompts),
            max_tokens=numbers.randint(1, 8),
            sampler=numbers.choice(samplers),
            processors=numbers.choice(penalties),
            stop=numbers.choice([(), ("ab",), ("c", "fgh")]),
            end=numbers.choice([(), (3,), (1, 2)]),
            seed=numbers.randrange(20),
            top_logprobs=numbers.choice([None, 0, 2]),
        )
        for _ in range(60)
    ]
    scheduler = Scheduler(model, tokenizer, max_rows=16, prefill_step_size=32)
    events: dict[int, list[Event]] = {}
    cancelled = set()
    unsent = list(requests)
    while scheduler.has_work or unsent:
        for _ in range(min(numbers.randrange(4), len(unsent))):
            events[scheduler.submit(unsent.pop(0))] = []
        for event in scheduler.step():
            assert event.request not in cancelled
            events[event.request].append(event)
        if numbers.random() < 0.3:
            number = numbers.choice(sorted(events))
            cancelled.add(number)
            scheduler.cancel(number)
    alone = Scheduler(model, tokenizer)
    for number, request in zip(events, requests, strict=True):
        (want,) = run(alone, [request])
        got = events[number]
        assert [(event.token, event.text) for event in got] == [
            (event.token, event.text) for event in want[: len(got)]
        ]
        assert len(got) == len(want) or number in cancelled
    assert 3 < len(cancelled) < 40


def test_a_text_ends_with_the_longest_that_the_model_reads() -> None:
    mx.random.seed(1)
    blocks = [Block(32, GMLP(32, max_length=10), SwiGLU(32)) for _ in range(2)]
    bound = SimpleNamespace(max_position_embeddings=10)
    model = Decoder(nn.Embedding(VOCABULARY, 32), blocks, nn.RMSNorm(32), config=bound)
    requests = [Request([n] * n, max_tokens=20) for n in (1, 6, 10)]
    scheduler = Scheduler(model, Characters(VOCABULARY))
    for n, events in zip((1, 6, 10), run(scheduler, requests), strict=True):
        assert events[-1].finish_reason == "length"
        assert n + len(events) == 11
        want = generate_tokens(model, [n] * n, max_tokens=11 - n)
        assert tokens_of(events) == list(want)
    with pytest.raises(ValueError, match="at most 10 tokens"):
        scheduler.submit(Request([1] * 11))


def test_a_text_ends_at_a_stop_string_or_an_end_token(model: Decoder, tokenizer: Tokenizer) -> None:
    plain = Request([9, 8, 7], max_tokens=12)
    (whole,) = run(Scheduler(model, tokenizer), [plain])
    text = "".join(event.text for event in whole)
    stop = text[5:8]
    end = tokens_of(whole)[3]
    assert end is not None
    stopped, ended = run(
        Scheduler(model, tokenizer), [replace(plain, stop=[stop]), replace(plain, end={end})]
    )
    assert "".join(event.text for event in stopped) == text[: text.index(stop)]
    assert tokens_of(ended) == tokens_of(whole)[: tokens_of(whole).index(end) + 1]
    assert [events[-1].finish_reason for events in (whole, stopped, ended)] == [
        "length",
        "stop",
        "stop",
    ]


def test_log_probabilities_are_those_of_the_model(model: Decoder, tokenizer: Tokenizer) -> None:
    requests = [
        Request([4, 5, 6], max_tokens=3, top_logprobs=count, processors=processors)
        for count in (None, 0, 3)
        for processors in ((), make_processors(repetition_penalty=5.0))
    ]
    for request, events in zip(requests, run(Scheduler(model, tokenizer), requests), strict=True):
        tokens = list(request.tokens)
        for event in events:
            assert event.token is not None
            if request.top_logprobs is None:
                assert event.logprobs is None
                continue
            logits = model(mx.array([tokens]))[0][0, -1].astype(mx.float32)
            want = logits - mx.logsumexp(logits)
            best = mx.argsort(-want)[: request.top_logprobs].tolist()
            assert event.logprobs is not None
            assert event.logprobs.token == event.token
            assert event.logprobs.logprob == pytest.approx(want[event.token].item(), rel=1e-4)
            assert [token for token, _ in event.logprobs.top] == best
            for token, logprob in event.logprobs.top:
                assert logprob == pytest.approx(want[token].item(), rel=1e-4)
            tokens.append(event.token)


def test_texts_without_a_seed_are_repeated_by_that_of_mlx(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    def own(logits: mx.array) -> mx.array:
        return mx.random.categorical(logits)

    def texts(seed: int, sampler: Any) -> list[list[int]]:
        mx.random.seed(seed)
        prompts = [[1, 2], [3], [4, 5, 6]]
        return batch_generate(
            model, tokenizer, prompts, max_tokens=6, batch_size=2, sampler=sampler
        ).tokens

    for sampler in (make_sampler(temp=1.0), own):
        assert texts(1, sampler) == texts(1, sampler) != texts(2, sampler)
