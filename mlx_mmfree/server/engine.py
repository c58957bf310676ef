"""The one thread that runs the models, and the way of events from it to the client."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import mlx.core as mx

from ..generation.scheduling import Event, Request, Scheduler
from ..platform.threads import ComputingThread
from .errors import RequestError
from .settings import ServedModel

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
        is_open: Whether a text is not finished.
        on_first: Called when the first token comes.
    """

    def __init__(self, size: int, leave: "Callable[[Channel], None]", timeout_s: float):
        self.size = size
        self._leave = leave
        self._unread: list[tuple[int, Event]] = []
        self._error: Exception | None = None
        self.is_open = size > 0
        self._unfinished = size
        self.on_first: Callable[[], None] | None = None
        self._news = asyncio.Event()
        timer = asyncio.get_running_loop().call_later
        self._deadline = timer(timeout_s, lambda: self.fail(timeout_error(timeout_s)))

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
            elif not self.is_open:
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


_log = logging.getLogger(__name__)

Steps = Generator[Any, None, Any]
"""Work that is done in steps between those of texts; what it returns is the result."""


def pause_s(texts: int) -> float:
    """Seconds between two pieces of a text, where more than one token is written meanwhile.

    Pieces take time from the model, so that those of many texts are fewer. At 20 a second a text still
    seems to flow.
    """
    return min(max(0.01, 0.002 * texts), 0.05)


class Engine:
    """Writes texts on a thread of its own, all that are under way together.

    Args:
        models: What it serves.
        make_scheduler: Makes the scheduler of a model, also anew after a failure.

    Attributes:
        active: Texts that were submitted and are not finished.
    """

    def __init__(
        self, models: Sequence[ServedModel], make_scheduler: Callable[[ServedModel], Scheduler]
    ):
        self._workers = {served.name: _Worker(served, make_scheduler) for served in models}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = ComputingThread(target=self._run, name="model", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._channels: set[Channel] = set()
        self._results: set[asyncio.Future[Any]] = set()
        self._goes_on = True
        self._events: deque[Delivery] = deque()
        self._is_woken = False
        self._handed_over = 0.0
        self.active = 0

    def start(self) -> None:
        """Starts the thread; the running event loop gets its events."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._commands.put(self._end)
        self._thread.join()

    def _end(self) -> None:
        self._goes_on = False

    def submit(self, served: ServedModel, requests: Sequence[Request], timeout_s: float) -> Channel:
        """Begins to write texts, whose events come through the channel in the order of `requests`."""
        channel = Channel(len(requests), self._leave, timeout_s)
        self._channels.add(channel)
        self.active += len(requests)
        worker = self._workers[served.name]
        self._commands.put(lambda: worker.submit(channel, requests))
        return channel

    def _leave(self, channel: Channel) -> None:
        """Forgets a channel that nobody reads any more; what is unfinished loses its row."""
        if channel in self._channels:
            self._channels.remove(channel)
            self.active -= channel.size
            for worker in self._workers.values() if channel.is_open else ():
                self._commands.put(partial(worker.cancel, channel))

    async def run_steps(self, served: ServedModel, steps: Steps, timeout_s: float) -> Any:
        """Runs other work with a model between the steps of its texts, and returns its result.

        Raises:
            RequestError: It is not done in time.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self._results.add(future)
        self._commands.put(lambda: self._workers[served.name].jobs.append((steps, future)))
        self.active += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise timeout_error(timeout_s) from error
        finally:
            self.active -= 1
            self._results.remove(future)

    def end_all(self, error: RequestError) -> None:
        """Lets every text and all other work that is under way end with an error."""
        for channel in list(self._channels):
            channel.fail(error)
        for future in self._results:
            if not future.done():
                future.set_exception(error)

    def _run(self) -> None:
        """Runs commands and steps, and hands what comes of these to asyncio.

        Tokens that follow others wait a little for the next ones: an event loop that is called for
        every token takes the processor from the model.
        """
        while self._goes_on:
            # all that came meanwhile; where there is nothing to do, the next that comes
            while not self._commands.empty() or (
                self._goes_on and not any(worker.has_work for worker in self._workers.values())
            ):
                self._commands.get()()
            for worker in self._workers.values():
                if not worker.has_work or not self._goes_on:
                    continue
                events, results = worker.step()
                self._events += events
                if worker.is_urgent:
                    self._loop.call_soon_threadsafe(self._hand_over)
                elif events and not self._is_woken:
                    self._is_woken = True
                    self._loop.call_soon_threadsafe(self._hand_over_later)
                if results:
                    self._loop.call_soon_threadsafe(_resolve, results)
        for worker in self._workers.values():
            worker.close()

    def _hand_over_later(self) -> None:
        self._loop.call_at(self._handed_over + pause_s(self.active), self._hand_over)

    def _hand_over(self) -> None:
        """Gives all events to their channels, on asyncio's thread."""
        # before they are taken, so that one that comes meanwhile wakes it again
        self._is_woken = False
        self._handed_over = self._loop.time()
        while self._events:
            channel, index, event = self._events.popleft()
            channel.put(index, event)


Delivery = tuple[Channel, int, Event | Exception]
Result = tuple["asyncio.Future[Any]", Any, Exception | None]


def _resolve(results: list[Result]) -> None:
    for future, value, error in results:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class _Worker:
    """The texts and other work of one model. Everything runs on the model's thread.

    Attributes:
        jobs: Other work, and who waits for it.
        is_urgent: Whether a text began, ended or failed in the last step.
    """

    def __init__(self, served: ServedModel, make_scheduler: Callable[[ServedModel], Scheduler]):
        self._served = served
        self._make_scheduler = make_scheduler
        self._scheduler: Scheduler | None = None
        self._routes: dict[int, tuple[Channel, int]] = {}
        self._begun: set[int] = set()
        self._refused: list[Delivery] = []
        self.is_urgent = False
        self.jobs: deque[tuple[Steps, asyncio.Future[Any]]] = deque()

    @property
    def has_work(self) -> bool:
        is_writing = self._scheduler is not None and self._scheduler.has_work
        return is_writing or bool(self.jobs) or bool(self._refused)

    def submit(self, channel: Channel, requests: Sequence[Request]) -> None:
        for index, request in enumerate(requests):
            try:
                if self._scheduler is None:
                    self._scheduler = self._make_scheduler(self._served)
                self._routes[self._scheduler.submit(request)] = (channel, index)
            except Exception as error:
                self._refused.append((channel, index, error))

    def cancel(self, channel: Channel) -> None:
        left = [number for number, (other, _) in self._routes.items() if other is channel]
        self._begun.difference_update(left)
        for number in left:
            del self._routes[number]
            if self._scheduler is not None:
                self._scheduler.cancel(number)

    def close(self) -> None:
        """Keeps what the texts have left to keep."""
        if self._scheduler is not None:
            try:
                self._scheduler.close()
            except Exception:
                _log.exception("Sessions of the model %s are lost.", self._served.name)

    def step(self) -> tuple[list[Delivery], list[Result]]:
        """One step of all texts, and one of the first other work."""
        deliveries, self._refused = self._refused, []
        self.is_urgent = bool(deliveries)
        if self._scheduler is not None and self._scheduler.has_work:
            deliveries += self._write(self._scheduler)
        return deliveries, self._work() if self.jobs else []

    def _write(self, scheduler: Scheduler) -> list[Delivery]:
        try:
            events = scheduler.step()
        except Exception as error:
            # the texts of this step are lost, the server is not
            _log.exception("The model %s failed; its texts end.", self._served.name)
            lost: list[Delivery] = [(*route, error) for route in self._routes.values()]
            self._routes.clear()
            self._begun.clear()
            self._scheduler = None
            self.is_urgent = True
            mx.clear_cache()
            return lost
        deliveries: list[Delivery] = []
        for event in events:
            number = event.request
            route = self._routes.get(number)
            if route is None:
                continue
            deliveries.append((*route, event))
            if event.is_last:
                self.is_urgent = True
                del self._routes[number]
                self._begun.discard(number)
            elif number not in self._begun:
                self.is_urgent = True
                self._begun.add(number)
        return deliveries

    def _work(self) -> list[Result]:
        steps, future = self.jobs[0]
        if future.done():
            self.jobs.popleft()
            return []
        try:
            next(steps)
        except StopIteration as end:
            self.jobs.popleft()
            return [(future, end.value, None)]
        except Exception as error:
            self.jobs.popleft()
            return [(future, None, error)]
        return []
