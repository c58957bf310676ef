"""Calls between tags, as Qwen3 and Hermes write them: `<tool_call>{…}</tool_call>`."""

from .calls import Part, parsed_call

BEGIN, END = "<tool_call>", "</tool_call>"


class TaggedCalls:
    """Finds calls between tags; all other text is the answer's own."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._has_call = False

    def add(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            tag = END if self._inside else BEGIN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            parts += self._call(before) if self._inside else self._text(before)
            self._held = after
            self._inside = not self._inside
        if not self._inside:
            cut = len(self._held) - _overlap(self._held, BEGIN)
            parts += self._text(self._held[:cut])
            self._held = self._held[cut:]
        return parts

    def finalize(self) -> list[Part]:
        held, self._held = self._held, ""
        if not self._inside:
            return self._text(held)
        # some models leave out the last tag
        call = parsed_call(held, "arguments")
        return [f"{BEGIN}{held}"] if call is None else [call]

    def _call(self, text: str) -> list[Part]:
        call = parsed_call(text, "arguments")
        if call is None:
            return [f"{BEGIN}{text}{END}"]
        self._has_call = True
        return [call]

    def _text(self, text: str) -> list[Part]:
        # line breaks between two calls belong to neither
        is_empty = not text or (self._has_call and text.isspace())
        return [] if is_empty else [text]


def _overlap(text: str, tag: str) -> int:
    """The length of the longest proper beginning of a tag that the text ends with."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
