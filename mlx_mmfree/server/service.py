"""Shared state of the endpoints: models, limits, metrics, and the way from a body to an answer."""

import asyncio
import gc
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..generation import scheduling
from ..generation.sessions import Sessions
from .answers import Answer, Batch, Sent
from .bodies.reading import BodyReader
from .engine.channel import Channel, timeout_error
from .engine.engine import Engine
from .errors import RequestError, ending_error, failure
from .json_rows import encode, json_response
from .metrics import Metrics
from .schemas import Body
from .settings import (
    BODIES_IN_MEMORY,
    BODY_SECONDS,
    LARGE_BODY_BYTES,
    QUIET_SECONDS,
    Catalogue,
    ServedModel,
    Settings,
)
from .stored_responses import StoredResponses
from .tool_calls.grammar import Grammar, Grammars, Lanes
from .tool_calls.sources import Source


@dataclass(eq=False)
class _Body:
    """A body.

    Attributes:
        limit: Ends it where it does not come in time.
        size: Bytes that have come.
        is_coming: Whether more is waited for.
        error: Why it was ended.
        chunks: What has come.
    """

    limit: asyncio.Timeout
    size: int = 0
    is_coming: bool = True
    error: RequestError | None = None
    chunks: list[bytes] = field(default_factory=list)

    def take(self) -> bytes:
        """All of it, which is not kept."""
        text = b"".join(self.chunks)
        self.chunks.clear()
        return text

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
    async def read(self, request: Request) -> AsyncIterator[_Body]:
        """The body of a request. Its bytes count until the block ends.

        Raises:
            RequestError: It is no JSON, is too large, or does not come.
        """
        header = request.headers.get("content-type") or "application/json"
        kind = header.partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                "[request] the header 'Content-Type' must be application/json or left out but is "
                f"{kind!r:.60}.",
                415,
            )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 19 or int(length) > self._max_bytes):
            raise self._too_large()
        body = _Body(asyncio.timeout(BODY_SECONDS))
        self._bodies[body] = None
        try:
            try:
                async with body.limit:
                    async for chunk in request.stream():
                        body.size += len(chunk)
                        if body.size > self._max_bytes:
                            raise self._too_large()
                        body.chunks.append(chunk)
                        if (
                            sum(each.size for each in self._bodies)
                            > BODIES_IN_MEMORY * self._max_bytes
                        ):
                            self._make_space()
            except TimeoutError as error:
                raise body.error or RequestError(
                    f"[request] the body must come within {BODY_SECONDS:g} s but did not.", 408
                ) from error
            body.is_coming = False
            yield body
        finally:
            del self._bodies[body]

    def end_all(self, error: RequestError) -> None:
        """Ends all that have not come yet."""
        for body in self._coming():
            body.end(error)

    def _make_space(self) -> None:
        large = [body for body in self._coming() if body.size > LARGE_BODY_BYTES]
        if large:
            large[0].end(
                RequestError(
                    "[server] the body must come while there is capacity for it but others came "
                    "meanwhile. Try again later.",
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


Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
T = TypeVar("T")
Seen = Callable[[Exception | None], None]
"""Takes what has ended an answer: an error, or `None` for its proper end."""


class EventStream(StreamingResponse):
    """An answer that is sent as it is written. Its rows are freed where the client goes away.

    Args:
        channel: What the model writes.
        answer: Puts it into the format of the interface.
        end_seen: Called at the end.
    """

    def __init__(self, channel: Channel, answer: Answer, end_seen: Seen):
        self._channel = channel
        events = _events(channel, answer, end_seen)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._channel):
            await super().__call__(scope, receive, send)


_MOST_SHOWN = 64
"""Steps of texts, and probabilities, that are answered before others have their turn."""


async def _slices(batch: Batch) -> AsyncIterator[Batch]:
    """A batch in slices, between which others are answered; an empty one tells that nothing came."""
    if not batch:
        yield batch
    start = shown = 0
    for stop, (_, event) in enumerate(batch, 1):
        # each probability that is shown takes about as long as a step without one
        shown += 1 + (0 if event.logprobs is None else len(event.logprobs.top))
        if shown >= _MOST_SHOWN or stop == len(batch):
            yield batch[start:stop]
            start, shown = stop, 0
            await asyncio.sleep(0)


async def _events(channel: Channel, answer: Answer, end_seen: Seen) -> AsyncIterator[bytes]:
    try:
        yield _written(answer, answer.opening())
        last = time.monotonic()
        async for batch in channel.batches(QUIET_SECONDS / 10):
            async for few in _slices(batch):
                if sent := answer.add(few):
                    yield _written(answer, sent)
                elif time.monotonic() - last >= QUIET_SECONDS:
                    yield _written(answer, answer.waiting()) or _COMMENT
                else:
                    continue
                last = time.monotonic()
        closing = await asyncio.to_thread(answer.closing)
        yield _written(answer, closing) + answer.last_line
        end_seen(None)
    except Exception as error:
        # the status is sent already
        end_seen(error)
        yield _written(answer, answer.failed(failure(error)))


_COMMENT = b": waiting\n\n"


def _written(answer: Answer, events: list[Sent]) -> bytes:
    """Events as a stream has them."""
    lines = []
    for event in events:
        lines += [f"event: {event['type']}\n"] if answer.names_events else []
        lines.append(f"data: {encode(event)}\n\n")
    return "".join(lines).encode()


async def while_connected(
    request: Request, work: Awaitable[T], ending: "asyncio.Future[RequestError] | None" = None
) -> T:
    """The result of some work, which is given up where the client goes away.

    Args:
        request: The request.
        work: The work.
        ending: Gives the work up with the error that it gets.

    Raises:
        ClientDisconnect: The client has gone away.
        RequestError: The work has failed, or was given up.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    ends: set[asyncio.Future[Any]] = {working, gone} | ({ending} if ending is not None else set())
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        if ending is not None and ending.done():
            raise ending.result()
        raise ClientDisconnect
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


B = TypeVar("B", bound=Body)
R = TypeVar("R")


def _uncollected(work: Callable[[], R]) -> R:
    """Runs a function without the garbage collector, on one thread at a time.

    The collector would look through all that a large body makes, and all threads wait for it.
    """
    gc.disable()
    try:
        return work()
    except Exception as error:
        # nor does it look through what the frames of an error hold
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        raise
    finally:
        gc.enable()


class Service:
    """A server's models and what is done with them.

    Args:
        settings: Its limits and defaults.
        catalogue: Its models.
        engine: Writes texts.
        metrics: Counts.
        sessions: The sessions of all models; `None` if no state is stored.

    Attributes:
        settings, catalogue, engine, metrics, sessions: As above.
        stored_responses: Responses that conversations may go on from.
        is_ending: Whether it takes no further requests.
    """

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        engine: Engine,
        metrics: Metrics,
        sessions: Sessions | None,
    ):
        self.settings = settings
        self.catalogue = catalogue
        self.engine = engine
        self.metrics = metrics
        self.sessions = sessions
        self.stored_responses = StoredResponses(settings)
        self.is_ending = False
        self._preparing = 0
        # each gets the error when the server begins to end
        self._endings: set[asyncio.Future[RequestError]] = set()
        self._bodies = Bodies(settings.max_body_bytes)
        self._reader = BodyReader(settings.max_body_bytes)
        self._large = ThreadPoolExecutor(1, "large-request")
        self._lanes = Lanes()
        # a model and its adapters have one vocabulary
        self._grammars = {
            id(served.tokenizer): Grammars(
                served.tokenizer, served.model.vocab_size, self._lanes, self.check_capacity
            )
            for served in catalogue
        }

    def close(self) -> None:
        """Ends what has helped to answer requests."""
        self._lanes.close()
        self._large.shutdown(cancel_futures=True)
        self._reader.close()
        for grammars in self._grammars.values():
            grammars.close()

    async def grammar(self, request: Request, served: ServedModel, source: Source) -> Grammar:
        """The grammar that holds a text to a schema or a call; given up if the client leaves.

        Raises:
            ClientDisconnect: The client has gone away.
            RequestError: There is no such grammar, it takes too much, or is not compiled in time.
        """
        seconds = self.settings.timeout_s
        self._preparing += 1
        try:
            async with asyncio.timeout(seconds):
                compiled = self._grammars[id(served.tokenizer)].compiled(source)
                return await self._while_running(request, compiled)
        except TimeoutError as error:
            raise timeout_error(seconds) from error
        finally:
            self._preparing -= 1

    async def prepared(self, request: Request, kind: type[B], prepare: Callable[[B], R]) -> R:
        """Works out what a request asks for, beside the event loop, which goes on.

        Raises:
            RequestError: The body is too large or wrong, or the server can take no further request.
        """
        self.check_capacity(1)
        async with self._bodies.read(request) as coming:
            self.check_capacity(1)
            self._preparing += 1

            def work() -> R:
                self.check_capacity()
                body = self._reader.read(kind, coming.take())
                request.state.user = getattr(body, "user", "")
                return prepare(body)

            # large ones one after another, so that they leave threads to the others
            is_large = coming.size > LARGE_BODY_BYTES
            threads, call = (self._large, partial(_uncollected, work)) if is_large else (None, work)
            try:
                working = asyncio.get_running_loop().run_in_executor(threads, call)
                return await self._while_running(request, working)
            finally:
                self._preparing -= 1

    async def _while_running(self, request: Request, work: Awaitable[T]) -> T:
        """Like `while_connected`, but given up as soon as the server begins to end."""
        ending: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()
        self._endings.add(ending)
        try:
            return await while_connected(request, work, ending)
        finally:
            self._endings.discard(ending)

    def begin_to_end(self) -> None:
        """Takes no further requests, also none whose body has not come or that is still prepared."""
        self.is_ending = True
        self._bodies.end_all(ending_error())
        for ending in self._endings:
            ending.set_result(ending_error())

    def check_capacity(self, texts: int = 0) -> None:
        """Refuses texts for which no row is free, and whatever else is asked of a server that ends.

        Raises:
            RequestError: Too many are under way, or the server ends.
        """
        if self.is_ending:
            raise ending_error()
        capacity = self.settings.max_rows + self.settings.max_waiting
        active = self.engine.active + self._preparing
        if active + texts > capacity:
            raise RequestError(
                f"[server] at most {capacity} texts must be under way but {active} are, and "
                f"{texts} more are asked for. Try again later.",
                429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )

    async def answered(
        self,
        request: Request,
        served: ServedModel,
        texts: list[scheduling.Request],
        answer: Answer,
        is_stream: bool,
    ) -> Response:
        """The response to a request for texts.

        Args:
            request: The request.
            served: The model.
            texts: What it is to write.
            answer: Puts that into the format of the interface.
            is_stream: Whether the answer is sent as it is written.

        Raises:
            ClientDisconnect: The client has gone away before.
            RequestError: No row is free for the texts, or they have ended before their time.
        """
        self.check_capacity(len(texts))
        answer.is_stream = is_stream
        channel = self.engine.submit(served, texts, self.settings.timeout_s)
        started = time.perf_counter()
        request.state.model = served.name
        metrics = self.metrics
        channel.on_first = lambda: metrics.first_token.observe(time.perf_counter() - started)

        def end_seen(error: Exception | None) -> None:
            usage = answer.usage
            metrics.prompt_tokens.inc(usage.prompt_tokens)
            metrics.cached_tokens.inc(usage.cached_tokens)
            metrics.generated_tokens.inc(usage.completion_tokens)
            request.state.tokens = (
                f"{usage.prompt_tokens} tokens read of which {usage.cached_tokens} were known, "
                f"{usage.completion_tokens} written"
            )
            if error is not None:
                request.state.error = type(error).__name__

        async def read() -> None:
            async for batch in channel.batches():
                async for few in _slices(batch):
                    answer.add(few)

        with ExitStack() as stack:
            stack.callback(channel.close)
            try:
                # what fails by then has a status of its own
                await while_connected(
                    request, channel.begun(QUIET_SECONDS) if is_stream else read()
                )
            except Exception as error:
                end_seen(error)
                raise
            if is_stream:
                # it closes the channel itself
                stack.pop_all()
                return EventStream(channel, answer, end_seen)
        end_seen(None)
        return json_response(await asyncio.to_thread(answer.whole))
