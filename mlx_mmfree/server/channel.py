"""The events of one request on their way from the model's thread to the client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from ..generation.scheduling import Event
from .errors import RequestError

MOST_UNREAD = 8192
"""Events that a client may lag behind before its request ends."""


class Channel:
    """What the model's thread has written for one request and the client has not read.

    It is used on asyncio's thread alone, inside `async with`, which frees the rows of texts that are
    not finished.

    Args:
        size: How many texts the request asked for.
        leave: Called once nobody reads it any more.
        timeout_s: Seconds after which it ends with an error.

    Attributes:
        size: As above.
        on_first: Called when the first token comes.
    """

    def __init__(self, size: int, leave: "Callable[[Channel], None]", timeout_s: float):
        self.size = size
        self._leave = leave
        self._unread: list[tuple[int, Event]] = []
        self._error: Exception | None = None
        self._open = size
        self.on_first: Callable[[], None] | None = None
        self._news = asyncio.Event()
        timer = asyncio.get_running_loop().call_later
        self._deadline = timer(timeout_s, self.fail, timeout_error(timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._deadline.cancel()
        self._leave(self)

    def put(self, index: int, event: Event | Exception) -> None:
        """Takes an event of a text, or the error that has ended it."""
        error = event if isinstance(event, Exception) else event.error
        if error is not None:
            self.fail(error)
            return
        assert isinstance(event, Event)
        if self.on_first is not None:
            self.on_first()
            self.on_first = None
        self._unread.append((index, event))
        self._open -= event.finish_reason is not None
        if len(self._unread) > MOST_UNREAD:
            self._unread.clear()
            self.fail(
                RequestError(
                    f"[server] the client must read its stream but is {MOST_UNREAD:,} steps behind.",
                    408,
                    code="client_too_slow",
                )
            )
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, once what has come is read; its rows are free at once."""
        self._error = self._error or error
        self._leave(self)
        self._news.set()

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yields all that has come, each time that something has, to the end of every text.

        Raises:
            Exception: What has ended a text before its time.
        """
        while True:
            if self._unread:
                batch, self._unread = self._unread, []
                yield batch
            elif self._error is not None:
                raise self._error
            elif not self._open:
                return
            else:
                self._news.clear()
                await self._news.wait()


def timeout_error(seconds: float) -> RequestError:
    return RequestError(
        f"[server] the answer must be written within {seconds:g} s but is not. Ask for fewer tokens.",
        504,
        code="timeout",
    )
