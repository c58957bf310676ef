"""What the endpoints share: models, limits, numbers, and the way from a body to an answer."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..generation.scheduling import Request as TextRequest
from ..generation.sessions import Sessions
from .answers.answer import Answer
from .answers.streams import EventStream, while_connected, whole_answer
from .bodies import Bodies
from .channel import timeout_error
from .engine import Engine
from .errors import RequestError, ending_error
from .grammar import Grammar, Grammars, Lanes, Source
from .metrics import Metrics
from .schemas.checking import Body, checked_body
from .schemas.sampling import StreamOptions
from .served import Catalogue, ServedModel
from .settings import LARGE_BODY_BYTES, Settings

B = TypeVar("B", bound=Body)
R = TypeVar("R")


class Service:
    """A server's models and what is done with them.

    Args:
        settings: Its limits and defaults.
        catalogue: Its models.
        engine: Writes texts.
        metrics: Counts.
        sessions: Those of all models; `None` if nothing is kept.

    Attributes:
        settings, catalogue, engine, metrics, sessions: As above.
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
        self.is_ending = False
        self._preparing = 0
        self._bodies = Bodies(settings.max_body_bytes)
        self._large = ThreadPoolExecutor(1, "large-request")
        self._lanes = Lanes()
        # a model and its adapters have one vocabulary
        self._grammars = {
            id(served.tokenizer): Grammars(
                served.tokenizer, served.model.vocab_size, self._lanes, self._check_running
            )
            for served in catalogue
        }

    def close(self) -> None:
        """Ends what has helped to answer requests."""
        self._lanes.close()
        self._large.shutdown(cancel_futures=True)
        for grammars in self._grammars.values():
            grammars.close()

    async def grammar(self, request: Request, served: ServedModel, source: Source) -> Grammar:
        """What holds a text of a request to a schema or a call; given up where the client goes away.

        Raises:
            ClientDisconnect: The client has gone away.
            RequestError: There is no such grammar, it takes too much, or is not compiled in time.
        """
        seconds = self.settings.timeout_s
        self._preparing += 1
        try:
            async with asyncio.timeout(seconds):
                compiled = self._grammars[id(served.tokenizer)].compiled(source)
                return await while_connected(request, compiled)
        except TimeoutError as error:
            raise timeout_error(seconds) from error
        finally:
            self._preparing -= 1

    async def prepared(self, request: Request, kind: type[B], prepare: Callable[[B], R]) -> R:
        """What a request asks for. It is worked out beside the event loop, which goes on.

        Raises:
            RequestError: The body is too large or wrong, or the server can take no further request.
        """
        self.check_room(1)
        async with self._bodies.read(request) as text:
            self.check_room(1)
            self._preparing += 1

            def work() -> R:
                self._check_running()
                body = checked_body(kind, text, self.settings.max_body_bytes)
                request.state.user = getattr(body, "user", "")
                return prepare(body)

            try:
                if len(text) <= LARGE_BODY_BYTES:
                    return await asyncio.to_thread(work)
                # one after another, so that they leave threads to the others
                working = asyncio.get_running_loop().run_in_executor(self._large, work)
                return await while_connected(request, working)
            finally:
                self._preparing -= 1

    def begin_to_end(self) -> None:
        """Takes no further requests, also none whose body has not come yet."""
        self.is_ending = True
        self._bodies.end_all(ending_error())

    def check_room(self, texts: int) -> None:
        """Refuses texts for which there is no place.

        Raises:
            RequestError: Too many are under way, or the server ends.
        """
        self._check_running()
        room = self.settings.max_rows + self.settings.max_waiting
        active = self.engine.active + self._preparing
        if active + texts > room:
            raise RequestError(
                f"[server] at most {room} texts must be under way but {active} are, and "
                f"{texts} more are asked for. Try again later.",
                429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )

    def _check_running(self) -> None:
        if self.is_ending:
            raise ending_error()

    async def answered(
        self,
        request: Request,
        served: ServedModel,
        texts: list[TextRequest],
        answer: Answer,
        stream: StreamOptions | None,
    ) -> Response:
        """The response to a request for texts.

        Args:
            request: The request.
            served: The model.
            texts: What it is to write.
            answer: Puts that into the form of the interface.
            stream: How the answer streams; `None` to send it whole.
        """
        self.check_room(len(texts))
        channel = self.engine.submit(served, texts, self.settings.timeout_s)
        started = time.perf_counter()
        request.state.model = served.name
        channel.on_first = lambda: self.metrics.first_token(started)

        def end_seen(error: Exception | None) -> None:
            usage = answer.usage
            self.metrics.tokens(usage)
            request.state.tokens = (
                f"{usage.prompt_tokens} tokens read of which {usage.cached_tokens} were known, "
                f"{usage.completion_tokens} written"
            )
            if error is not None:
                request.state.error = type(error).__name__

        if stream is not None:
            return EventStream(channel, answer, stream.include_usage, end_seen)
        return await whole_answer(request, channel, answer, end_seen)
