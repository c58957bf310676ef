"""Bodies of requests on their way, and what they take of memory all together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request

from .errors import RequestError
from .settings import BODY_SECONDS, HELD_BODIES, LARGE_BODY_BYTES


@dataclass(eq=False)
class _Body:
    """A body.

    Attributes:
        limit: Ends it where it does not come in time.
        size: Bytes that have come.
        is_coming: Whether more is waited for.
        error: Why it was ended.
    """

    limit: asyncio.Timeout
    size: int = 0
    is_coming: bool = True
    error: RequestError | None = None

    def end(self, error: RequestError) -> None:
        """Gives it up, and frees what has come of it."""
        if self.limit.expired():
            return
        self.size, self.is_coming, self.error = 0, False, error
        self.limit.reschedule(0)


class Bodies:
    """Reads bodies. Where they take too much together, those that have come for longest are given up.

    So no number of senders fills the memory, and none that sends slowly keeps others from being heard.

    Args:
        max_bytes: The most bytes of one.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        # in the order in which they began
        self._bodies: dict[_Body, None] = {}

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request. Its bytes count until the block ends.

        Raises:
            RequestError: It is no JSON, is too large, or does not come.
        """
        _check_kind(request)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 19 or int(length) > self._max_bytes):
            raise self._too_large()
        body = _Body(asyncio.timeout(BODY_SECONDS))
        self._bodies[body] = None
        try:
            yield await self._read(request, body)
        finally:
            del self._bodies[body]

    def end_all(self, error: RequestError) -> None:
        """Ends all that have not come yet."""
        for body in self._coming():
            body.end(error)

    async def _read(self, request: Request, body: _Body) -> bytes:
        pieces = []
        try:
            async with body.limit:
                async for piece in request.stream():
                    body.size += len(piece)
                    if body.size > self._max_bytes:
                        raise self._too_large()
                    pieces.append(piece)
                    self._make_room()
        except TimeoutError as error:
            raise body.error or RequestError(
                f"[request] the body must come within {BODY_SECONDS:g} s but did not.", 408
            ) from error
        finally:
            body.is_coming = False
        return b"".join(pieces)

    def _make_room(self) -> None:
        if sum(body.size for body in self._bodies) <= HELD_BODIES * self._max_bytes:
            return
        large = [body for body in self._coming() if body.size > LARGE_BODY_BYTES]
        if large:
            large[0].end(
                RequestError(
                    "[server] the body must come while there is room for it but others came meanwhile. "
                    "Try again later.",
                    429,
                    code="rate_limit_exceeded",
                    retry_after_s=1,
                )
            )

    def _coming(self) -> list[_Body]:
        return [body for body in self._bodies if body.is_coming]

    def _too_large(self) -> RequestError:
        return RequestError(
            f"[request] the body must have at most {self._max_bytes:,} bytes but has more.",
            413,
            code="body_too_large",
        )


def _check_kind(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            "[request] the header 'Content-Type' must be application/json but "
            + (f"is {kind!r:.60}." if kind else "is missing."),
            415,
        )
