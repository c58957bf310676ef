"""Ctrl-C and SIGTERM during a run: the first one lets the step end and the state be saved."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

_NOTE = b"\nThe run stops after this step and is saved. Once more stops it at once.\n"


class StopRequest:
    """Notes the first SIGINT or SIGTERM inside the `with` block; a second one acts as usual.

    Signals that are ignored stay ignored, and only Python's main thread can take any.

    Args:
        is_quiet: Say nothing.

    Attributes:
        signal: The signal's number; 0 as long as there was none.
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
            # print() could meet itself inside a signal handler
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _NOTE)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
