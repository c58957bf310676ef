"""Calls without tags, as Llama 3 writes them: the whole answer is `{"name": …, "parameters": {…}}`."""

from collections.abc import Collection

from .calls import Part, parsed_call

_PYTHON_TAG = "<|python_tag|>"


class BareCalls:
    """Holds back an answer that begins as a call does, and says at its end what it is.

    Args:
        names: The functions that may be called. An object with another name is an ordinary answer.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._is_text = False

    def add(self, text: str) -> list[Part]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or _may_become(begun, _PYTHON_TAG):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return [held]

    def finalize(self) -> list[Part]:
        held, self._held = self._held, ""
        call = parsed_call(held.strip().removeprefix(_PYTHON_TAG), "parameters")
        if call is not None and call.name in self._names:
            return [call]
        return [held] if held else []


def _may_become(text: str, tag: str) -> bool:
    return text.startswith(tag) or tag.startswith(text)
