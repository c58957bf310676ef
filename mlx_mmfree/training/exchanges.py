"""The thread that exchanges numbers with other processes, one message after another.

MLX can queue many exchanges. If another process dies, however, those in the queue wait for it for ever,
and MLX waits for them when it queues the next one or ends. Here an exchange begins after the one before
it has ended, so that nothing is left in MLX's queue when one fails.
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

import mlx.core as mx


class Exchanges:
    """Runs exchanges in the order in which they are asked for, beside the thread that computes.

    After one has failed, all later ones fail with the same error.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], mx.array], Future[mx.array]]] = SimpleQueue()
        self._thread: Thread | None = None

    def add(self, exchange: Callable[[], mx.array]) -> "Future[mx.array]":
        """The future result of an exchange.

        Args:
            exchange: Builds the array that is exchanged from arrays of which each has been computed, or
                is being computed after `mx.async_eval`.
        """
        if self._thread is None:
            # an exchange with a process that hangs cannot be ended, and must not keep this one running
            self._thread = Thread(target=self._work, daemon=True)
            self._thread.start()
        future: Future[mx.array] = Future()
        self._tasks.put((exchange, future))
        return future

    def _work(self) -> None:
        failure: Exception | None = None
        while True:
            exchange, future = self._tasks.get()
            if failure is not None:
                future.set_exception(failure)
                continue
            try:
                result = exchange()
                mx.eval(result)
            except Exception as error:
                failure = error
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # what was exchanged is not kept until the next exchange
            del exchange, future
