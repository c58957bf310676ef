"""The text of one prompt as it grows, to its end."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from .stop_strings import StopStrings, TextEnd


def end_tokens(tokenizer: Any, extra: Collection[int | str] = ()) -> frozenset[int]:
    """The ids that end a text: the tokenizer's own and the extra ones.

    Args:
        tokenizer: Knows its `eos_token_ids`.
        extra: Ids, or tokens by their name in the vocabulary or their text, such as `"<|im_end|>"`.

    Raises:
        ValueError: A text is not exactly one token.
    """
    return frozenset(tokenizer.eos_token_ids) | {_token_id(tokenizer, token) for token in extra}


def _token_id(tokenizer: Any, token: int | str) -> int:
    if isinstance(token, int):
        return token
    if token.isdecimal():
        return int(token)
    named: int | None = tokenizer.token_id(token)
    if named is not None:
        return named
    # within a text, and at its start
    inside: list[int] = tokenizer.encode_continuation(token, parse_special=True)
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False, parse_special=True)
    for found in (inside, ids):
        if len(found) == 1:
            return found[0]
    raise ValueError(
        f"[generate] 'extra_eos_token' must be an id or one token of the vocabulary but got "
        f"{token!r}, which is {len(ids)} tokens."
    )


FinishReason = Literal["stop", "length"]


class Completion:
    """The text of one prompt as it grows.

    Args:
        tokenizer: Turns tokens into text.
        stop: Strings that end the text, or what ends it otherwise.
        end: Tokens that end the text.
        max_tokens: How many tokens there may be.
        after: The ids of the prompt whose text this one goes on; none, if it begins anew.

    Attributes:
        tokens: Those so far.
        remaining: How many may follow.
        finish_reason: Why the text has ended; `None` where it has not.
        stop_string: The stop string that has ended it, if one has.
        is_cut: Whether the last tokens are a stop string, or may be a prefix of one.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] | TextEnd,
        end: Collection[int],
        max_tokens: int,
        after: Collection[int] = (),
    ):
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.is_cut = False
        self._detokenizer = tokenizer.detokenizer(after=after)
        self._stop: TextEnd | None = None
        if not isinstance(stop, Sequence):
            self._stop = stop
        elif len(stop) or isinstance(stop, str):
            self._stop = StopStrings(stop)
        self._end = end
        self.remaining = max_tokens
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, token: int) -> str:
        """Takes a token and returns the text that it adds."""
        self.tokens.append(token)
        self.remaining -= 1
        if token in self._end:
            self.finish_reason = "stop"
            text = self._detokenizer.finalize()
        else:
            text = self._detokenizer.add(token)
            if not self.remaining:
                self.finish_reason = "length"
                text += self._detokenizer.finalize()
        if self._stop is not None:
            text = self._stop.add(text)
            self.stop_string = self._stop.met
            if self._stop.is_met:
                self.finish_reason = "stop"
            elif self.finish_reason:
                text += self._stop.finalize()
            self.is_cut = self._stop.met is not None or self._stop.holds_back
        self._parts.append(text)
        return text
