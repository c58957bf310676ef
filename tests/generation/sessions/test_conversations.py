"""Conversations through a scheduler with sessions: which tokens are read twice, with equal results."""

import random
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.generation import generate_tokens, with_key_values
from mlx_mmfree.generation.scheduling import Event, Request, Scheduler
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.generation.states import selected_rows
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.layers import RoPE, pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit, llama
from mlx_mmfree.token_mixers import GQA
from tests.generation.models import SETTINGS, Dictation, alone
from tests.generation.sessions.texts import same_bits

SYSTEM, QUESTION, NEXT = list(range(5, 45)), [50, 51, 52], [60, 61, 62, 63]
REPLY = 6


def _recurrent(vocabulary: int) -> Decoder:
    config = hgrn_bit.Config(
        vocab_size=vocabulary,
        hidden_size=48,
        num_hidden_layers=2,
        intermediate_size=80,
        conv_size=4,
        share_conv_kernel=False,
        initializer_range=0.3,
    )
    return pack_linears(hgrn_bit.build(config))


def _attention(vocabulary: int) -> Decoder:
    config = llama.Config(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.3,
    )
    return llama.build(config)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Decoder:
    mx.random.seed(7)
    return _recurrent(tokenizer.vocab_size)


@pytest.fixture(scope="module", params=["recurrent", "attention", "quantised_window"])
def either(request: pytest.FixtureRequest, model: Decoder, tokenizer: Tokenizer) -> Decoder:
    """A model with one of three kinds of states."""
    if request.param == "recurrent":
        return model
    mx.random.seed(7)
    return with_key_values(_attention(tokenizer.vocab_size), **SETTINGS[request.param])


def _of_kind(kind: str, vocabulary: int) -> Decoder:
    """A model with one of all kinds of states."""
    mx.random.seed(7)
    if kind in CACHED:
        return with_key_values(_attention(vocabulary), **CACHED[kind])
    model = _recurrent(vocabulary)
    if kind == "hybrid":
        model.blocks[1].token_mixer = GQA(48, num_heads=3, rope=RoPE(16))
    return model


@pytest.mark.sample(2)
def test_a_lone_text_waits_for_no_state_and_few_states_wait(
    either: Decoder, tokenizer: Tokenizer
) -> None:
    with Sessions(either, memory_bytes=2**30) as sessions:
        scheduler = Scheduler(either, tokenizer, sessions=sessions, max_rows=1)
        scheduler.submit(Request(QUESTION, max_tokens=REPLY, seed=1))
        tokens = 0
        while tokens < REPLY:
            tokens += len(scheduler.step())
        assert sessions.stats().sessions == 0
        # what a text that waits goes on from comes first
        scheduler.submit(Request([*QUESTION, *NEXT], max_tokens=REPLY, seed=1))
        while not (events := scheduler.step()):
            pass
        assert events[0].cached_tokens == len(QUESTION) - 1
        for n in range(20):
            scheduler.submit(Request([70 + n, *NEXT], max_tokens=2, seed=1))
        stored = []
        while scheduler.has_work:
            if any(event.finish_reason is not None for event in scheduler.step()):
                stored.append(sessions.stats().sessions)
        assert all(count >= n - 4 for n, count in enumerate(stored, 1)), stored
        for n in range(20):
            assert sessions.find([70 + n, *NEXT, 1]).count >= len(NEXT)


class Server:
    """A scheduler whose sessions are looked at."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, sessions: Sessions | None = None):
        self.sessions = Sessions(model, memory_bytes=2**24) if sessions is None else sessions
        self.scheduler = Scheduler(
            model, tokenizer, max_rows=4, prefill_step_size=16, sessions=self.sessions
        )

    def ask(self, *requests: Request) -> list[list[Event]]:
        """The events of requests that come at once."""
        events: dict[int, list[Event]] = {self.scheduler.submit(each): [] for each in requests}
        while self.scheduler.has_work:
            for event in self.scheduler.step():
                events[event.request].append(event)
        return list(events.values())

    def reply(
        self, tokens: Sequence[int], breakpoints: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        """The reply to a conversation, and how many of its tokens were read."""
        before = self.scheduler.tokens_read
        (events,) = self.ask(Request(tokens, max_tokens=REPLY, breakpoints=breakpoints))
        read = self.scheduler.tokens_read - before
        assert events[0].cached_tokens == len(tokens) - 1 - read
        return reply_of(events), read


def reply_of(events: Sequence[Event]) -> list[int]:
    tokens = [event.token for event in events]
    assert None not in tokens, events[-1].error
    return tokens  # type: ignore[return-value]


@pytest.mark.sample(2)
def test_a_conversation_sent_again_reads_only_what_is_new(
    either: Decoder, tokenizer: Tokenizer
) -> None:
    server = Server(either, tokenizer)
    text = [*SYSTEM, *QUESTION]
    for turn in range(4):
        reply, read = server.reply(text)
        # the last token of a text is read with the reply, and the reply's last not before it is sent
        assert read == (len(text) - 1 if turn == 0 else len(NEXT))
        assert reply == alone(either, text, REPLY)
        text += [*reply, *NEXT]


def test_a_reply_that_comes_back_otherwise_costs_one_turn(
    either: Decoder, tokenizer: Tokenizer
) -> None:
    server = Server(either, tokenizer)
    text = [*SYSTEM, *QUESTION]
    breakpoints = [len(SYSTEM), len(text)]
    for turn in range(3):
        reply, read = server.reply(text, breakpoints)
        # the end of the last message is not the end of what was sent
        assert read == len(text) - 1 if turn == 0 else read == 1 + REPLY + len(NEXT) - 1
        assert reply == alone(either, text, REPLY)
        text += [*([70] * REPLY), *NEXT]
        breakpoints.append(len(text))


@pytest.mark.sample(2)
def test_a_prefix_of_many_is_read_once(either: Decoder, tokenizer: Tokenizer) -> None:
    server = Server(either, tokenizer)
    mark = len(SYSTEM)
    server.reply([*SYSTEM, *QUESTION], [mark])
    for question in ([80, 81, 82], [90, 91]):
        text = [*SYSTEM, *question]
        reply, read = server.reply(text, [mark])
        assert read == len(question) - 1 and reply == alone(either, text, REPLY)
    texts = [[*SYSTEM, n, n + 1] for n in range(100, 104)]
    before = server.scheduler.tokens_read
    replies = server.ask(*(Request(text, max_tokens=REPLY, breakpoints=[mark]) for text in texts))
    assert server.scheduler.tokens_read - before == len(texts)
    assert [reply_of(reply) for reply in replies] == [alone(either, text, REPLY) for text in texts]


CACHED = SETTINGS | {"wide_window": {"max_kv_size": 128}}
ENDINGS = ["<|eot_id|>", "#", "\n\n### User", " zebra crossing"]
"""An end token, and stop strings of one token and of several."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["recurrent", "hybrid", *CACHED])
def test_a_conversation_that_stopped_reads_only_what_is_new(
    kind: str, ending: str, tokenizer: Tokenizer
) -> None:
    """The stop string of an answer is no part of the text that is sent next."""
    model = _of_kind(kind, tokenizer.vocab_size)
    server = Server(model, tokenizer)
    text = [*SYSTEM, *QUESTION]
    reply_ids = tokenizer.encode("The fox and the hen", add_special_tokens=False)
    ids = tokenizer.encode(ending, add_special_tokens=False)
    (end,) = ids if ending == ENDINGS[0] else [0]
    for turn in range(3):
        reply = Dictation((*reply_ids, *ids))
        asked = Request(
            text, max_tokens=40, processors=[reply], end=[end], stop=[] if end else [ending]
        )
        before = server.scheduler.tokens_read
        (events,) = server.ask(asked)
        assert events[-1].finish_reason == "stop"
        assert "".join(event.text for event in events) == tokenizer.decode(reply_ids)
        read = server.scheduler.tokens_read - before
        # the slots of a window that is full are written over, so that the answer is read a second time
        again = 1 + len(reply_ids) if kind in ("window", "quantised_window") else 0
        assert read == (len(text) - 1 if turn == 0 else again + len(NEXT) - 1)
        text += [*reply_ids, *NEXT]
    assert server.reply(text)[0] == alone(model, text, REPLY)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_texts_that_stop_beside_others_are_kept_as_their_own(
    kind: str, tokenizer: Tokenizer
) -> None:
    model = _of_kind(kind, tokenizer.vocab_size)
    server = Server(model, tokenizer)
    texts = [[*SYSTEM, n] for n in (100, 101, 102)]
    replies = [(200,) * 3, (201,) * 2, (202,) * 2]
    asked = [
        Request(text, max_tokens=9, processors=[Dictation((*reply, 7))], end=[7])
        for text, reply in zip(texts, replies, strict=True)
    ]
    server.ask(*asked)
    for text, reply in zip(texts, replies, strict=True):
        whole = [*text, *reply, *NEXT]
        assert server.reply(whole) == (alone(model, whole, REPLY), len(NEXT) - 1)


def test_nothing_is_lost_where_no_step_follows(model: Decoder, tokenizer: Tokenizer) -> None:
    """Neither of a text that has just ended, nor of one that was cancelled."""
    server = Server(model, tokenizer)
    ended, cancelled = [*SYSTEM, *QUESTION], [*SYSTEM, *NEXT]
    first = server.scheduler.submit(Request(ended, max_tokens=REPLY))
    second = server.scheduler.submit(Request(cancelled, max_tokens=50))
    replies: dict[int, list[int]] = {first: [], second: []}
    while len(replies[first]) < REPLY:
        for event in server.scheduler.step():
            assert event.token is not None
            replies[event.request].append(event.token)
    server.scheduler.cancel(second)
    server.scheduler.close()
    assert server.sessions.find([*ended, *replies[first]]).count == len(ended) + REPLY - 1
    whole = [*cancelled, *replies[second], 1]
    assert server.sessions.find(whole).count == len(whole) - 1


def test_what_is_kept_has_the_bits_of_what_is_read_now(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    server = Server(model, tokenizer)
    text, mark = [*SYSTEM, *QUESTION], len(SYSTEM)
    reply, _ = server.reply(text, [mark])
    whole = [*text, *reply]
    for length in (mark, len(text) - 1, len(whole) - 1):
        known = server.sessions.find(whole[: length + 1])
        assert known.count == length
        _, state = model.hidden(mx.array([whole[:length]]))
        assert same_bits(known.state, state), length


@pytest.mark.exhaustive
def test_many_conversations_at_once_are_those_alone(
    either: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """They fork, go on and come back, while memory holds a few of them and a folder the others."""
    numbers = random.Random(3)
    memory = 20_000
    with Sessions(either, memory_bytes=memory, folder=tmp_path) as sessions:
        server = Server(either, tokenizer, sessions)
        texts = [[*SYSTEM, 100]]
        for _ in range(4):
            asked = []
            for _ in range(5):
                text = numbers.choice(texts)
                text = text[: numbers.randint(12, len(text))]
                text = [*text, *(numbers.randrange(either.vocab_size) for _ in range(3))]
                breakpoints = sorted(numbers.sample(range(1, len(text)), 3))
                asked.append(
                    Request(text, max_tokens=numbers.randint(1, 8), breakpoints=breakpoints)
                )
            for request, events in zip(asked, server.ask(*asked), strict=True):
                reply = reply_of(events)
                assert reply == alone(either, request.tokens, request.max_tokens)
                texts.append([*request.tokens, *reply])
        sessions.flush()
        stats = sessions.stats()
        assert stats.hits > 10 and stats.memory_bytes <= memory
        assert stats.lost == 0 and stats.disk_sessions == stats.sessions > stats.memory_sessions
        for text in texts[::3]:
            known = sessions.find(text)
            assert known.count
            rest = text[known.count :]
            want = alone(either, text, 2)
            assert list(generate_tokens(either, rest, state=known.state, max_tokens=2)) == want


def test_a_state_beside_longer_texts_is_that_of_its_own(tokenizer: Tokenizer) -> None:
    """It is not quantised for them, and serves as it would alone."""
    mx.random.seed(7)
    model = with_key_values(_attention(tokenizer.vocab_size), **SETTINGS["quantised_later"])
    server = Server(model, tokenizer)
    short, long = [1, 2, 3], [*SYSTEM, *QUESTION]
    events = server.ask(Request(short, max_tokens=14), Request(long, max_tokens=8))
    replies = [reply_of(each) for each in events]
    assert replies == [alone(model, short, 14), alone(model, long, 8)]
    for text, reply in zip((short, long), replies, strict=True):
        text = [*text, *reply]
        known = server.sessions.find(text)
        assert known.count == len(text) - 1
        want = alone(model, text, 4)
        rest = text[known.count :]
        assert list(generate_tokens(model, rest, state=known.state, max_tokens=4)) == want
    assert server.reply(short)[0] == alone(model, short, REPLY)


def test_a_state_that_neighbours_have_changed_is_not_kept(tokenizer: Tokenizer) -> None:
    """A caller's own batch is quantised with its longest row."""
    mx.random.seed(7)
    model = with_key_values(_attention(tokenizer.vocab_size), **SETTINGS["quantised_later"])
    tokens = mx.array([SYSTEM[:20], [0] * 17 + [1, 2, 3]])
    _, state = model.hidden(tokens, valid=tokens > 0)
    for row, text, length in ((0, SYSTEM[:20], 20), (1, [1, 2, 3], 0)):
        sessions = Sessions(model, memory_bytes=10**7)
        sessions.keep(text, selected_rows(model, state, [row], len(text)))
        assert sessions.find([*text, 5]).count == length
