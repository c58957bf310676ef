"""The one thread that runs the models, their weights, and the way of events from it to the client.

Models may be loaded when they are asked for, and leave memory when others need it.
"""

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

from ..generation.memory import MemoryNeed, joint_bytes
from ..generation.scheduling import Event, Request, Scheduler
from ..models import Decoder
from ..platform.threads import ComputingThread
from .errors import RequestError
from .settings import ServedModel


class Weights:
    """The weights that a model shares with its adapters, in memory or not.

    Args:
        models: The model and its adapters, as requests are checked against them. Where `load` is given,
            they need no weights.
        load: Loads them all, in this order; `None`: they are loaded and stay.
        need: What they take, by the memory plan.

    Attributes:
        models, need: As above.
        is_loaded: Whether they are in memory.
        last_use: Greater than for all weights that were used before.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        load: Callable[[], Sequence[ServedModel]] | None = None,
        need: MemoryNeed | None = None,
    ):
        self.models = list(models)
        self.need = need
        self._load = load
        self._loaded = list(models) if load is None else []
        self.is_loaded = load is None
        self.last_use = 0.0

    def loaded(self, name: str) -> ServedModel:
        """The model of a name, ready to compute; it is loaded if it must be.

        Raises:
            RequestError: It cannot be loaded.
        """
        if not self.is_loaded and self._load is not None:
            self._loaded = self._read(self._load)
            self.is_loaded = True
        pairs = zip(self.models, self._loaded, strict=True)
        known, found = next(pair for pair in pairs if pair[0].name == name)
        # the tokenizer is always there
        return replace(found, tokenizer=known.tokenizer)

    def _read(self, load: Callable[[], Sequence[ServedModel]]) -> list[ServedModel]:
        name, begun = self.models[0].name, time.perf_counter()
        try:
            loaded = list(load())
        except Exception as error:
            # its words may name files of this machine
            _log.exception("The model %s cannot be loaded.", name)
            raise RequestError(
                f"[server] the model {name!r:.100} must be loaded but cannot be. The server's log has "
                "more.",
                500,
                code="model_error",
            ) from error
        _log.info("Loaded %s in %.1f s.", name, time.perf_counter() - begun)
        return loaded

    def let_go(self) -> None:
        """Frees the memory, once nobody else holds a model."""
        self._loaded, self.is_loaded = [], False
        # what the modules of a model hold of each other
        gc.collect()
        mx.clear_cache()
        _log.info("%s has left memory.", self.models[0].name)


def leaving(
    wanted: Weights,
    others: Sequence[Weights],
    budget_bytes: int | None,
    is_busy: Callable[[Weights], bool],
) -> list[Weights] | None:
    """The models that must leave before weights can be loaded, the least recently used first.

    Weights that are too large for the plan alone are loaded alone.

    Args:
        wanted: Those to be loaded.
        others: All others.
        budget_bytes: What those in memory may take together; `None`: any number.
        is_busy: Whether weights are under way, and so must stay.

    Returns:
        `None` if there is no room before some that are under way come to rest.
    """

    def fit() -> bool:
        needs = [each.need for each in (*staying, wanted) if each.need is not None]
        return budget_bytes is None or joint_bytes(needs) <= budget_bytes

    staying = [each for each in others if each.is_loaded or is_busy(each)]
    gone: list[Weights] = []
    for each in sorted(staying, key=lambda each: each.last_use):
        if fit():
            break
        if not is_busy(each):
            staying.remove(each)
            gone.append(each)
    return gone if not staying or fit() else None


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

    def __init__(self, size: int, leave: "Callable[[Channel], None]", timeout_s: float):
        self.size = size
        self._leave = leave
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
        """Must follow in any case; frees the rows of texts that are not finished."""
        self._deadline.cancel()
        self._leave(self)

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
        self._leave(self)
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


_log = logging.getLogger(__name__)

Steps = Generator[Any, None, Any]
"""Work that is done in steps between the steps of texts; what it returns is the result."""


def pause_s(texts: int) -> float:
    """Seconds between two pieces of a text, where more than one token is written meanwhile.

    Pieces take time from the model, so that many texts get fewer of them. At 20 a second a text still
    seems to flow.
    """
    return min(max(0.01, 0.002 * texts), 0.05)


class Engine:
    """Writes texts on a thread of its own, all that are under way together.

    Models are loaded on that thread too, so that texts of other models wait for as long.

    Args:
        weights: Those of all models.
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
        begin = partial(worker.submit, channel, requests, self._loop)
        waiting = _Waiting(worker, begin, lambda: channel in self._channels)
        self._commands.put(lambda: self._waiting.append(waiting))
        return channel

    def is_loaded(self, served: ServedModel) -> bool:
        """Whether a model is in memory."""
        return self._workers[served.name].weights.is_loaded

    def _leave(self, channel: Channel) -> None:
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
                if not weights.is_loaded and not self._make_room(waiting):
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
                    self._loop.call_soon_threadsafe(self._hand_over)
                elif events and not self._is_woken:
                    self._is_woken = True
                    later = self._handed_over + pause_s(self.active)
                    self._loop.call_soon_threadsafe(self._loop.call_at, later, self._hand_over)
                if results:
                    self._loop.call_soon_threadsafe(_resolve, results)
        for worker in self._workers.values():
            worker.close()

    def _make_room(self, waiting: "_Waiting") -> bool:
        """Lets models go for that which is waited for; whether there is room for it now."""
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

    def _hand_over(self) -> None:
        """Gives all events to their channels, on asyncio's thread."""
        # before they are taken, so that one that comes meanwhile wakes it again
        self._is_woken = False
        self._handed_over = self._loop.time()
        while self._events:
            channel, index, event = self._events.popleft()
            channel.put(index, event)


@dataclass(frozen=True)
class _Waiting:
    """The work that begins once its model is loaded.

    Attributes:
        worker: That of the model.
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
