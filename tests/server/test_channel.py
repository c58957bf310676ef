"""The way of events from the model's thread to a client."""

import asyncio

import pytest

from mlx_mmfree.generation.scheduling import Event
from mlx_mmfree.server.channel import MOST_UNREAD, Channel
from mlx_mmfree.server.errors import RequestError

pytestmark = pytest.mark.serve


def event(text: str = "a", is_last: bool = False) -> Event:
    return Event(1, text, 5, None, "stop" if is_last else None, 3, 0)


async def read(channel: Channel) -> list[str]:
    return [event.text async for batch in channel.batches() for _, event in batch]


def test_events_come_in_order_to_the_end_of_every_text() -> None:
    async def main() -> list[str]:
        left: list[Channel] = []
        async with Channel(2, left.append, 60) as channel:
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
        async with Channel(1, left.append, 60) as channel:
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
        async with Channel(1, lambda channel: None, 60) as channel:
            channel.put(0, event("a"))
            channel.put(0, ZeroDivisionError())
            texts = []
            with pytest.raises(ZeroDivisionError):
                async for batch in channel.batches():
                    texts += [event.text for _, event in batch]
            return texts

    assert asyncio.run(main()) == ["a"]
