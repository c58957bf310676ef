"""A run stops between steps when it is asked to."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

_NOTE = (
    b"\nThe run will stop after this step and be saved. Press Ctrl-C again to stop it at once.\n"
)


class StopRequest:
    """Records the first SIGINT or SIGTERM inside the `with` block. A second one acts as usual.

    Ignored signals stay ignored. Outside Python's main thread, no signal is recorded.

    Args:
        is_quiet: Whether to print no message.

    Attributes:
        signal: Number of the recorded signal, or 0.
    """

    def __init__(self, is_quiet: bool = False):
        self.signal = 0
        self._is_quiet = is_quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        if not self._is_quiet:
            # print() is not safe in a signal handler: it may interrupt another print()
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _NOTE)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
