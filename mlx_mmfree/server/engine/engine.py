"""The one thread that computes with the models, and the work that waits for it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

from ...generation.scheduling import Event, Request, Scheduler
from ...models import Decoder
from ...platform.threads import ComputingThread
from ..errors import RequestError
from ..settings import ServedModel
from .channel import Channel, timeout_error
from .weights import Weights, leaving

_log = logging.getLogger(__name__)

Steps = Generator[Any, None, Any]
"""Work that is done in steps between the steps of texts; what it returns is the result."""


def pause_s(texts: int) -> float:
    """Seconds between two chunks of a text, where more than one token is written meanwhile.

    Chunks take time from the model, so that many texts get fewer of them. At 20 a second a text still
    seems to flow.
    """
    return min(max(0.01, 0.002 * texts), 0.05)


class Engine:
    """Writes texts on a thread of its own, all that are under way together.

    Models are loaded on that thread too, so that texts of other models wait for as long.

    Args:
        weights: The weights of all models.
        make_scheduler: Makes the scheduler of a model, also anew after a failure.
        budget_bytes: What the weights in memory may need together; `None`: any number.

    Attributes:
        active: Texts that were submitted and are not finished.
    """

    def __init__(
        self,
        weights: Sequence[Weights],
        make_scheduler: Callable[[ServedModel], Scheduler],
        budget_bytes: int | None = None,
    ):
        self._workers = {
            served.name: _Worker(served.name, each, make_scheduler)
            for each in weights
            for served in each.models
        }
        self._weights = list(weights)
        self._budget_bytes = budget_bytes
        # what waits for its model, in the order in which it came
        self._waiting: deque[_Waiting] = deque()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = ComputingThread(target=self._run, name="model", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._channels: set[Channel] = set()
        self._results: set[asyncio.Future[Any]] = set()
        self._goes_on = True
        self._events: deque[Delivery] = deque()
        self._is_woken = False
        self._delivered_at = 0.0
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
        channel = Channel(len(requests), self._forget, timeout_s)
        self._channels.add(channel)
        self.active += len(requests)
        worker = self._workers[served.name]
        begin = partial(worker.submit, channel, requests, self._loop)
        waiting = _Waiting(worker, begin, lambda: channel in self._channels)
        self._commands.put(lambda: self._waiting.append(waiting))
        return channel

    def is_loaded(self, served: ServedModel) -> bool:
        """Returns whether a model is in memory."""
        return self._workers[served.name].weights.is_loaded

    def _forget(self, channel: Channel) -> None:
        """Forgets a channel that nobody reads any more; what is unfinished loses its row."""
        if channel in self._channels:
            self._channels.remove(channel)
            self.active -= channel.size
            for worker in self._workers.values() if channel.is_open else ():
                self._commands.put(partial(worker.cancel, channel))

    async def run_steps(
        self, served: ServedModel, make_steps: Callable[[Decoder], Steps], timeout_s: float
    ) -> Any:
        """Runs other work with a model between the steps of its texts, and returns its result.

        Args:
            served: The model.
            make_steps: Begins the work.
            timeout_s: Seconds in which it must be done.

        Raises:
            RequestError: It is not done in time.
        """
        worker = self._workers[served.name]
        future: asyncio.Future[Any] = self._loop.create_future()
        self._results.add(future)
        waiting = _Waiting(
            worker,
            lambda: worker.begin(make_steps, future),
            lambda: not future.done(),
        )
        self._commands.put(lambda: self._waiting.append(waiting))
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
        """Runs commands and steps, and hands their results to asyncio.

        Tokens that follow others wait a little for the next ones: an event loop that is called for
        every token takes the processor from the model.
        """
        while self._goes_on:
            # all that came meanwhile; where there is nothing to do, the next that comes
            while not self._commands.empty() or (
                self._goes_on
                and not self._waiting
                and not any(worker.has_work for worker in self._workers.values())
            ):
                self._commands.get()()
            while self._waiting and self._goes_on:
                waiting = self._waiting[0]
                weights = waiting.worker.weights
                if not weights.is_loaded and not self._make_space(waiting):
                    # all that has come later waits too, so that those under way come to rest
                    break
                self._waiting.popleft()
                weights.last_use = time.monotonic()
                if waiting.is_wanted():
                    waiting.begin()
            for worker in self._workers.values():
                if not worker.has_work or not self._goes_on:
                    continue
                events, results = worker.step()
                self._events += events
                if worker.is_urgent:
                    self._loop.call_soon_threadsafe(self._deliver)
                elif events and not self._is_woken:
                    self._is_woken = True
                    later = self._delivered_at + pause_s(self.active)
                    self._loop.call_soon_threadsafe(self._loop.call_at, later, self._deliver)
                if results:
                    self._loop.call_soon_threadsafe(_resolve, results)
        for worker in self._workers.values():
            worker.close()

    def _make_space(self, waiting: "_Waiting") -> bool:
        """Lets models go for that which is waited for; whether there is capacity for it now."""
        if not waiting.is_wanted():
            return True
        wanted = waiting.worker.weights
        others = [each for each in self._weights if each is not wanted]
        gone = leaving(wanted, others, self._budget_bytes, self._is_busy)
        for each in gone or ():
            self._let_go(each)
        return gone is not None

    def _is_busy(self, weights: Weights) -> bool:
        return any(
            worker.has_work for worker in self._workers.values() if worker.weights is weights
        )

    def _let_go(self, weights: Weights) -> None:
        for worker in self._workers.values():
            if worker.weights is weights:
                worker.close()
        weights.let_go()

    def _deliver(self) -> None:
        """Gives all events to their channels, on asyncio's thread."""
        # before they are taken, so that one that comes meanwhile wakes it again
        self._is_woken = False
        self._delivered_at = self._loop.time()
        while self._events:
            channel, index, event = self._events.popleft()
            channel.put(index, event)


@dataclass(frozen=True)
class _Waiting:
    """The work that begins once its model is loaded.

    Attributes:
        worker: The worker of the model.
        begin: Begins it; the model is loaded by that.
        is_wanted: Whether somebody still waits for it.
    """

    worker: "_Worker"
    begin: Callable[[], None]
    is_wanted: Callable[[], bool]


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

    Args:
        name: The name of the model.
        weights: Its weights.
        make_scheduler: As for `Engine`.

    Attributes:
        weights: As above.
        jobs: Other work, and who waits for it.
        is_urgent: Whether a text began, ended or failed in the last step.
    """

    def __init__(
        self, name: str, weights: Weights, make_scheduler: Callable[[ServedModel], Scheduler]
    ):
        self._name = name
        self.weights = weights
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

    def submit(
        self, channel: Channel, requests: Sequence[Request], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Begins to write texts, and tells the channel in its loop; the next step tells of a refusal."""
        known = len(self._refused)
        for index, request in enumerate(requests):
            try:
                if self._scheduler is None:
                    self._scheduler = self._make_scheduler(self.weights.loaded(self._name))
                self._routes[self._scheduler.submit(request)] = (channel, index)
            except Exception as error:
                self._refused.append((channel, index, error))
        if len(self._refused) == known:
            loop.call_soon_threadsafe(channel.is_taken.set)

    def begin(self, make_steps: Callable[[Decoder], Steps], future: asyncio.Future[Any]) -> None:
        """Begins other work, for which somebody waits."""
        self.jobs.append((self._steps(make_steps), future))

    def _steps(self, make_steps: Callable[[Decoder], Steps]) -> Steps:
        return (yield from make_steps(self.weights.loaded(self._name).model))

    def cancel(self, channel: Channel) -> None:
        left = [number for number, (other, _) in self._routes.items() if other is channel]
        self._begun.difference_update(left)
        for number in left:
            del self._routes[number]
            if self._scheduler is not None:
                self._scheduler.cancel(number)

    def close(self) -> None:
        """Keeps what the texts have left to keep, and lets go of the model."""
        if self._scheduler is not None:
            try:
                self._scheduler.close()
            except Exception:
                _log.exception("Sessions of the model %s are lost.", self._name)
            self._scheduler = None

    def step(self) -> tuple[list[Delivery], list[Result]]:
        """One step of all texts, and one of the first other work."""
        deliveries, self._refused = self._refused, []
        self.is_urgent = bool(deliveries)
        events: list[Event] = []
        try:
            if self._scheduler is not None and self._scheduler.has_work:
                events = self._scheduler.step()
        except Exception as error:
            # the texts of this step are lost, the server is not
            _log.exception("The model %s failed; its texts end.", self._name)
            deliveries += [(*route, error) for route in self._routes.values()]
            self._routes.clear()
            self._begun.clear()
            self._scheduler = None
            self.is_urgent = True
            mx.clear_cache()
        for event in events:
            number = event.request
            route = self._routes.get(number)
            if route is None:
                continue
            deliveries.append((*route, event))
            if event.finish_reason is not None or event.error is not None:
                self.is_urgent = True
                del self._routes[number]
                self._begun.discard(number)
            elif number not in self._begun:
                self.is_urgent = True
                self._begun.add(number)
        return deliveries, self._work() if self.jobs else []

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
