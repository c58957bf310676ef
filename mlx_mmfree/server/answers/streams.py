"""Answers on their way to the client: whole, or as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..channel import Channel
from ..errors import failure
from .answer import Answer

T = TypeVar("T")
Seen = Callable[[Exception | None], None]
"""Takes what has ended an answer: an error, or `None` for its proper end."""


class EventStream(StreamingResponse):
    """An answer that is sent as it is written. Its rows are freed where the client goes away.

    Args:
        channel: What the model writes.
        answer: Puts it into the form of the interface.
        has_usage: Whether the last event says how many tokens it took.
        end_seen: Called at the end.
    """

    def __init__(
        self,
        channel: Channel,
        answer: Answer,
        has_usage: bool,
        end_seen: Seen,
    ):
        self._channel = channel
        events = _events(channel, answer, has_usage, end_seen)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._channel:
            await super().__call__(scope, receive, send)


async def _events(
    channel: Channel, answer: Answer, has_usage: bool, end_seen: Seen
) -> AsyncIterator[bytes]:
    try:
        if opening := answer.opening():
            yield _event(answer.chunk(opening))
        async for batch in channel.batches():
            if pieces := answer.add(batch):
                # a piece of each text, as clients expect one choice a chunk
                yield b"".join(_event(answer.chunk([piece])) for piece in pieces)
        if has_usage:
            yield _event(answer.chunk([], usage=True))
        yield b"data: [DONE]\n\n"
        end_seen(None)
    except Exception as error:
        # the status was sent long ago
        end_seen(error)
        yield _event(failure(error).body())


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encode(data).encode("utf-8") + b"\n\n"


async def whole_answer(
    request: Request, channel: Channel, answer: Answer, end_seen: Seen
) -> Response:
    """The answer, once all of it is written.

    Raises:
        ClientDisconnect: The client has gone away before.
        RequestError: The texts have ended before their time.
    """

    async def read() -> None:
        async for batch in channel.batches():
            answer.add(batch)

    async with channel:
        try:
            await while_connected(request, read())
        except Exception as error:
            end_seen(error)
            raise
    end_seen(None)
    return JSONResponse(answer.whole())


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is given up where the client goes away.

    Raises:
        ClientDisconnect: The client has gone away.
        RequestError: The work has failed.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    except ClientDisconnect:
        raise
    except Exception as error:
        raise failure(error) from error
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
