"""The text of one prompt as it grows."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from .stop import StopStrings

FinishReason = Literal["stop", "length"]


class Completion:
    """The text of one prompt as it grows.

    Args:
        tokenizer: Turns tokens into text.
        stop: Strings that end the text.
        end: Tokens that end the text.
        max_tokens: How many tokens there may be.
        after: The ids of the prompt whose text this one goes on; none, if it begins anew.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        end: Collection[int],
        max_tokens: int,
        after: Collection[int] = (),
    ):
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._detokenizer = tokenizer.detokenizer(after=after)
        self._stop = StopStrings(stop)
        self._end = end
        self._max_tokens = max_tokens
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def remaining(self) -> int:
        """How many tokens may follow."""
        return self._max_tokens - len(self.tokens)

    def add(self, token: int) -> str:
        """Takes a token and returns the text that it adds."""
        self.tokens.append(token)
        if token in self._end:
            self.finish_reason = "stop"
            text = self._detokenizer.finalize()
        else:
            text = self._detokenizer.add(token)
            if not self.remaining:
                self.finish_reason = "length"
                text += self._detokenizer.finalize()
        text = self._stop.add(text)
        if self._stop.is_met:
            self.finish_reason = "stop"
        elif self.finish_reason:
            text += self._stop.finalize()
        self._parts.append(text)
        return text
