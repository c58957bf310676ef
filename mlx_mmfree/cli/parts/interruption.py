"""Ctrl-C while a model writes: it ends the text, and what was written stays."""

import signal
from types import FrameType


class Interruption:
    """Ctrl-C inside the `with` block: noted once tokens come, so that it cuts no step; else raised.

    Attributes:
        is_noted: Ctrl-C was pressed after tokens came.
        tokens_come: Whether they do, set by the user of this class.
    """

    def __init__(self) -> None:
        self.is_noted = self.tokens_come = False

    def __enter__(self) -> "Interruption":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted or not self.tokens_come:
            raise KeyboardInterrupt
        self.is_noted = True
