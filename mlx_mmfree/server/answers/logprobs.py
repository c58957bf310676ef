"""Tokens with the logarithms of their probabilities."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from ...generation.scheduling import Event, TokenLogprobs
from ..token_bytes import token_bytes

_IMPOSSIBLE = -9999.0
"""What stands for the logarithm of 0, which JSON cannot write."""

Likely = tuple[int, TokenLogprobs]


class ShownTokens:
    """Writes tokens as clients read them.

    Args:
        tokenizer: Knows their bytes.
        end: Tokens that end a text; they are not shown.
    """

    def __init__(self, tokenizer: Any, end: Collection[int]):
        self._tokenizer = tokenizer
        self._end = end

    def detokenizer(self, after: Collection[int]) -> Any:
        """Gives the characters that each token adds to a text after some tokens."""
        return self._tokenizer.detokenizer(after=after)

    def text(self, token: int) -> str:
        """The text of a token; bytes that are no character alone are replaced."""
        return self._bytes(token).decode("utf-8", "replace")

    def likely(self, step: TokenLogprobs) -> list[tuple[int, float]]:
        """The likeliest tokens of a step that have a text."""
        return [
            (token, value)
            for token, value in step.top
            if token_bytes(self._tokenizer, token) is not None
        ]

    def number(self, value: float) -> float:
        """A logarithm of a probability, as JSON can write it."""
        return value if math.isfinite(value) else _IMPOSSIBLE

    def steps(self, events: Sequence[Event]) -> list[Likely]:
        """The tokens of some steps with their probabilities."""
        return [
            (event.token, event.logprobs)
            for event in events
            if event.token is not None
            and event.logprobs is not None
            and event.token not in self._end
        ]

    def entries(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Steps of a text with their probabilities, in the form of chats."""
        return [
            {
                **self._entry(token, likely.logprob),
                "top_logprobs": [self._entry(*each) for each in self.likely(likely)],
            }
            for token, likely in self.steps(events)
        ]

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        raw = self._bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": self.number(value), "bytes": list(raw)}

    def _bytes(self, token: int) -> bytes:
        return token_bytes(self._tokenizer, token) or b""
