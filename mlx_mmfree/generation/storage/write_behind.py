"""Writes to the disk in a thread of its own."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Condition, Thread
from typing import Generic, TypeVar

from .keys import TextKey

Job = TypeVar("Job")


class WriteBehind(Generic[Job]):
    """Jobs that a thread does in their order. While too many bytes wait, the oldest jobs are given up.

    Args:
        work: Does a job; it must not raise.
        limit: Bytes that may wait. A job alone may have more.
    """

    def __init__(self, work: Callable[[TextKey, Job], None], limit: int):
        self._work = work
        self._limit = limit
        self._changed = Condition()
        self._waiting: OrderedDict[TextKey, tuple[Job, int]] = OrderedDict()
        self._nbytes = 0
        self._busy: TextKey | None = None
        self._is_closed = False
        self._thread: Thread | None = None

    def __len__(self) -> int:
        """How many jobs wait or are being done."""
        with self._changed:
            return len(self._waiting) + (self._busy is not None)

    def add(self, key: TextKey, job: Job, nbytes: int) -> int:
        """Takes a job, unless one for the same text waits or is being done.

        Returns:
            How many jobs were given up.

        Raises:
            RuntimeError: It is closed.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("[Sessions] must not be used after 'close'.")
            if key == self._busy or key in self._waiting:
                return 0
            if self._thread is None:
                self._thread = Thread(target=self._run, name="sessions", daemon=True)
                self._thread.start()
            self._waiting[key] = job, nbytes
            self._nbytes += nbytes
            given_up = 0
            while self._nbytes > self._limit and len(self._waiting) > 1:
                self._pop()
                given_up += 1
            self._changed.notify_all()
            return given_up

    def flush(self) -> None:
        """Waits until nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._busy is None)

    def close(self) -> None:
        """Does what is left and ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _pop(self) -> tuple[TextKey, Job]:
        key, (job, nbytes) = self._waiting.popitem(last=False)
        self._nbytes -= nbytes
        return key, job

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        finally:
            # nobody waits for a thread that has ended
            with self._changed:
                self._waiting.clear()
                self._busy = None
                self._changed.notify_all()

    def _do_next(self) -> bool:
        """Does a job, or returns `False` if it is closed and none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return False
            key, job = self._pop()
            self._busy = key
        self._work(key, job)
        with self._changed:
            self._busy = None
            self._changed.notify_all()
        return True


WAITING_BYTES = 2**28
"""Bytes that may wait for the disk."""

_OVERHEAD_BYTES = 500
"""About what the tables take for a session in memory (measured)."""
