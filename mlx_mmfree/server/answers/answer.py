"""What the two forms of answers have in common."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ...generation.scheduling import Event
from ...version import __version__
from .usage import Usage

Choice = dict[str, Any]
Batch = Sequence[tuple[int, Event]]


class Answer(ABC):
    """The answer to one request as it grows.

    Args:
        prefix: What its identifier begins with.
        kind: The `object` of the whole answer.
        chunk_kind: The `object` of a piece of it.
        model: The name of the model.
        texts: How many texts were asked for.
        texts_a_prompt: How many of them each prompt gets.

    Attributes:
        usage: What it has taken so far.
    """

    def __init__(
        self, prefix: str, kind: str, chunk_kind: str, model: str, texts: int, texts_a_prompt: int
    ):
        self._texts = texts
        self._kind = kind
        self._chunk_kind = chunk_kind
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"mmfree-{__version__}",
        }
        self.usage = Usage(texts_a_prompt)

    def add(self, batch: Batch) -> list[Choice]:
        """Takes what was written and returns what it adds, as pieces of texts."""
        of_text: dict[int, list[Event]] = {}
        for index, event in batch:
            self.usage.add(index, event)
            of_text.setdefault(index, []).append(event)
        pieces = [self._piece(index, events) for index, events in of_text.items()]
        return [piece for piece in pieces if piece is not None]

    def chunk(self, choices: Sequence[Choice], usage: bool = False) -> dict[str, Any]:
        """A piece of a streamed answer."""
        chunk = {**self._head, "object": self._chunk_kind, "choices": list(choices)}
        return chunk | ({"usage": self.usage.as_json()} if usage else {})

    def whole(self) -> dict[str, Any]:
        """The answer, once it is complete."""
        choices = [self._choice(index) for index in range(self._texts)]
        usage = self.usage.as_json()
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    def opening(self) -> list[Choice]:
        """The pieces that a stream begins with."""
        return []

    @abstractmethod
    def _piece(self, index: int, events: Sequence[Event]) -> Choice | None:
        """What steps of one text add to it; `None` for nothing that is shown."""

    @abstractmethod
    def _choice(self, index: int) -> Choice:
        """A whole text."""
