"""What ends a text: stop strings and end-of-text tokens."""

from collections.abc import Collection, Sequence
from typing import Any


class StopStrings:
    """Ends a text before the first of some strings; no part of it is ever shown.

    Text that could be the beginning of a stop string is held back until more text decides.

    Args:
        strings: The stop strings; none is empty.

    Raises:
        ValueError: A string is empty.

    Example:
        >>> stop = StopStrings(["END"])
        >>> stop.add("the E"), stop.add("ND of it"), stop.is_met
        ('the ', '', True)
    """

    def __init__(self, strings: Sequence[str] = ()):
        if isinstance(strings, str):
            strings = [strings]
        if "" in strings:
            raise ValueError("[StopStrings] 'stop' must not hold an empty string.")
        self._strings = tuple(strings)
        self._held = ""
        self.is_met = False

    def add(self, text: str) -> str:
        """Takes new text and returns what may be shown."""
        text = self._held + text
        found = [(start + len(s), start) for s in self._strings if (start := text.find(s)) >= 0]
        if found:
            # The one that is complete first, so that it does not matter how the text is cut.
            self.is_met, self._held = True, ""
            return text[: min(found)[1]]
        cut = len(text) - max((_overlap(text, s) for s in self._strings), default=0)
        self._held = text[cut:]
        return text[:cut]

    def finalize(self) -> str:
        """The text held back, once no more follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest proper beginning of `string` that `text` ends with."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


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
    # within a text, and at its beginning
    inside: list[int] = tokenizer.encode_continuation(token, parse_special=True)
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False, parse_special=True)
    for found in (inside, ids):
        if len(found) == 1:
            return found[0]
    raise ValueError(
        f"[generate] 'extra_eos_token' must be an id or one token of the vocabulary but got "
        f"{token!r}, which is {len(ids)} tokens."
    )
