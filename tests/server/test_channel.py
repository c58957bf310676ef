"""The way of events from the model's thread to a client."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from mlx_mmfree.generation.scheduling import Event, Request
from mlx_mmfree.server.engine.channel import MOST_UNREAD, Channel
from mlx_mmfree.server.engine.engine import Engine, pause_s
from mlx_mmfree.server.engine.weights import Weights
from mlx_mmfree.server.errors import RequestError
from mlx_mmfree.server.settings import ServedModel
from tests.platform.test_threads import run_often

pytestmark = pytest.mark.serve


def event(text: str = "a", is_last: bool = False) -> Event:
    return Event(1, text, 5, None, "stop" if is_last else None, 3, 0)


async def read(channel: Channel) -> list[str]:
    return [event.text async for batch in channel.batches() for _, event in batch]


def test_events_come_in_order_to_the_end_of_every_text() -> None:
    async def main() -> list[str]:
        left: list[Channel] = []
        with closing(Channel(2, left.append, 60)) as channel:
            channel.put(0, event("a"))
            reading = asyncio.ensure_future(read(channel))
            await asyncio.sleep(0)
            channel.put(1, event("b", is_last=True))
            await asyncio.sleep(0)
            assert not reading.done()
            channel.put(0, event("c", is_last=True))
            texts = await reading
        assert left == [channel]
        return texts

    assert asyncio.run(main()) == ["a", "b", "c"]


def test_a_client_that_does_not_read_loses_its_rows() -> None:
    async def main() -> None:
        left: list[Channel] = []
        with closing(Channel(1, left.append, 60)) as channel:
            for _ in range(MOST_UNREAD):
                channel.put(0, event())
            assert not left
            channel.put(0, event())
            # before the client has read anything
            assert left == [channel]
            with pytest.raises(RequestError) as refusal:
                await read(channel)
            assert refusal.value.code == "client_too_slow"

    asyncio.run(main())


def test_an_error_follows_what_came_before_it() -> None:
    async def main() -> list[str]:
        with closing(Channel(1, lambda channel: None, 60)) as channel:
            channel.put(0, event("a"))
            channel.put(0, ZeroDivisionError())
            texts = []
            with pytest.raises(ZeroDivisionError):
                async for batch in channel.batches():
                    texts += [event.text for _, event in batch]
            return texts

    assert asyncio.run(main()) == ["a"]


Chunk = tuple[float, list[int | None]]


class Steps:
    """A scheduler whose steps write a token each, and take given seconds.

    One without a number takes until all tokens before it were found.
    """

    def __init__(self, seconds: Sequence[float | None], found: Sequence[Chunk]):
        self._left = list(seconds)
        self._found = found
        self._last = len(seconds) - 1
        self._number = 0

    @property
    def has_work(self) -> bool:
        return bool(self._number and self._left)

    def submit(self, request: Request) -> int:
        self._number = 1
        return 1

    def step(self) -> list[Event]:
        seconds = self._left.pop(0)
        token = self._last - len(self._left)
        if seconds is None:
            until = time.monotonic() + 60
            while sum(len(tokens) for _, tokens in self._found) < token:
                assert time.monotonic() < until
                time.sleep(0.001)
        else:
            time.sleep(seconds)
        return [Event(1, "x", token, None, None if self._left else "length", 3, 0)]

    def cancel(self, request: int) -> None:
        self._left = []

    def close(self) -> None:
        pass


def chunks(seconds: Sequence[float | None]) -> list[Chunk]:
    """When each chunk came, from the first on, and its tokens."""
    nothing: Any = None
    served = ServedModel("model", nothing, nothing)

    found: list[Chunk] = []

    def make(_: object) -> Any:
        return Steps(seconds, found)

    async def read() -> list[Chunk]:
        engine = Engine([Weights([served])], make)
        engine.start()
        try:
            with closing(engine.submit(served, [Request([1, 2, 3])], 60.0)) as channel:
                async for batch in channel.batches():
                    found.append((time.monotonic(), [event.token for _, event in batch]))
        finally:
            engine.stop()
        return [(at - found[0][0], tokens) for at, tokens in found]

    return asyncio.run(read())


def test_quick_tokens_come_together_and_in_order() -> None:
    found = chunks([0.0005] * 300)
    assert [token for _, tokens in found for token in tokens] == list(range(300))
    # the last one is not held back, and a busy machine only makes them fewer
    assert len(found) <= 3 + (found[-1][0] / pause_s(1)) < 150
    assert len(found) > 2


def test_chunks_of_many_texts_are_fewer() -> None:
    assert [pause_s(texts) for texts in (1, 4, 16, 64, 1000)] == [0.01, 0.01, 0.032, 0.05, 0.05]


def test_slow_tokens_come_alone() -> None:
    found = chunks([None] * 5)
    assert [tokens for _, tokens in found] == [[0], [1], [2], [3], [4]]


def test_no_token_waits_for_a_long_step() -> None:
    found = chunks([0.001, 0.001, 0.001, None, 0.001])
    assert [token for _, tokens in found for token in tokens] == [0, 1, 2, 3, 4]


_ENGINES = """
import asyncio
from contextlib import closing
from mlx_mmfree import demo, load, make_sampler
from mlx_mmfree.generation.scheduling import Request
from mlx_mmfree.server.run import make_service
from mlx_mmfree.server.settings import ServedModel
from mlx_mmfree.server.settings import Settings

model, tokenizer = load(demo.path())

async def write():
    served = ServedModel("m", model, tokenizer)
    engine = make_service([served], Settings()).engine
    engine.start()
    texts = [Request([5], max_tokens=2, sampler=make_sampler(temp=1))]
    with closing(engine.submit(served, texts, 60)) as channel:
        async for _ in channel.batches():
            pass
    engine.stop()

async def main():
    for _ in range(8):
        await write()

asyncio.run(main())
"""


def test_a_program_ends_right_after_its_engine() -> None:
    # what MLX keeps for the thread of each would be freed while Python ends
    run_often(_ENGINES)
