"""Ctrl-C while a model writes: it ends the text, and what was written stays."""

import signal
from types import FrameType


class Interruption:
    """Notes the first Ctrl-C inside the `with` block, so that no decoding step is cut short.

    Before the first token has come, and at the second press, Ctrl-C raises `KeyboardInterrupt`.

    Attributes:
        is_noted: Whether Ctrl-C was pressed after the first token.
        has_tokens: Whether the first token has come. The user of this class sets it.
    """

    def __init__(self) -> None:
        self.is_noted = self.has_tokens = False

    def __enter__(self) -> "Interruption":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted or not self.has_tokens:
            raise KeyboardInterrupt
        self.is_noted = True
