"""The way of one request's results from the computing thread to its answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from ...generation.scheduling import Event
from ..errors import RequestError

MOST_UNREAD = 8192
"""The most events that wait for a slow client before its request ends."""


class Channel:
    """The text that the model's thread has written for one request and the client has not read.

    It is used on asyncio's thread alone.

    Args:
        size: How many texts the request asked for.
        leave: Called once nobody reads it any more.
        timeout_s: Seconds after which it ends with an error.

    Attributes:
        size: As above.
        is_open: Whether a text is not finished.
        on_first: Called when the first token comes.
        is_taken: Set once the model is loaded and has taken the request, or the request has ended.
    """

    def __init__(self, size: int, forget: "Callable[[Channel], None]", timeout_s: float):
        self.size = size
        self._forget = forget
        self._unread: list[tuple[int, Event]] = []
        self._error: Exception | None = None
        self._refusal: Exception | None = None
        self.is_open = size > 0
        self._unfinished = size
        self.on_first: Callable[[], None] | None = None
        self._news = asyncio.Event()
        self.is_taken = asyncio.Event()
        timer = asyncio.get_running_loop().call_later
        self._deadline = timer(timeout_s, lambda: self.fail(timeout_error(timeout_s)))

    def close(self) -> None:
        """Must be called in any case; frees the rows of texts that are not finished."""
        self._deadline.cancel()
        self._forget(self)

    async def begun(self, quiet_s: float | None = None) -> None:
        """Waits until the model has taken the request, though no longer than some seconds.

        Raises:
            Exception: It has not, as its weights cannot be loaded, or what has ended the request before.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(quiet_s):
                await self.is_taken.wait()
        if self._refusal is not None:
            raise self._refusal

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
        self._unfinished -= event.finish_reason is not None
        self.is_open = self._unfinished > 0
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
        if not self.is_taken.is_set():
            self._refusal = self._error
        self._forget(self)
        self._news.set()
        self.is_taken.set()

    async def batches(self, quiet_s: float | None = None) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yields all that has come, each time that something has, to the end of every text.

        Args:
            quiet_s: Seconds without anything after which an empty list is yielded; `None`: never.

        Raises:
            Exception: What has ended a text before its time.
        """
        while True:
            if self._unread:
                batch, self._unread = self._unread, []
                yield batch
            elif self._error is not None:
                raise self._error
            elif not self.is_open:
                return
            else:
                self._news.clear()
                try:
                    async with asyncio.timeout(quiet_s):
                        await self._news.wait()
                except TimeoutError:
                    yield []


def timeout_error(seconds: float) -> RequestError:
    return RequestError(
        f"[server] the answer must be written within {seconds:g} s but is not. Ask for fewer tokens.",
        504,
        code="timeout",
    )
