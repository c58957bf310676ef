"""Answers of `/v1/chat/completions`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...generation.scheduling import Event
from ..tools.calls import CallReader, Part, ToolCall
from .answer import Answer, Choice
from .logprobs import ShownTokens


@dataclass
class _Text:
    reader: CallReader | None
    parts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatAnswer(Answer):
    """Messages that answer a conversation.

    Args:
        model: The name of the model.
        texts: How many messages were asked for.
        make_reader: Makes what finds calls of tools in a message; `None` without tools.
        shown: Writes tokens with their probabilities; `None` shows none.
    """

    def __init__(
        self,
        model: str,
        texts: int,
        make_reader: Callable[[], CallReader] | None,
        shown: ShownTokens | None,
    ):
        kind = "chat.completion"
        super().__init__("chatcmpl", kind, f"{kind}.chunk", model, texts, texts)
        self._shown = shown
        self._all = [_Text(make_reader() if make_reader else None) for _ in range(texts)]

    def opening(self) -> list[Choice]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self._texts)
        ]

    def _piece(self, index: int, events: Sequence[Event]) -> Choice | None:
        text = self._all[index]
        parts = self._parts(text, events)
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = len(text.calls)
            delta["tool_calls"] = [
                {"index": first + number, **call.as_json()} for number, call in enumerate(calls)
            ]
        text.parts.append(content)
        text.calls += calls
        text.finish_reason = events[-1].finish_reason
        if text.finish_reason == "stop" and text.calls:
            text.finish_reason = "tool_calls"
        tokens = [] if self._shown is None else self._shown.entries(events)
        text.tokens += tokens
        if not delta and text.finish_reason is None and not tokens:
            return None
        return {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(tokens) if tokens else None,
            "finish_reason": text.finish_reason,
        }

    def _parts(self, text: _Text, events: Sequence[Event]) -> list[Part]:
        added = "".join(event.text for event in events)
        if text.reader is None:
            return [added]
        parts = text.reader.add(added)
        is_last = events[-1].finish_reason is not None
        return parts + text.reader.finalize() if is_last else parts

    def _choice(self, index: int) -> Choice:
        text = self._all[index]
        content = "".join(text.parts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if text.calls:
            message["content"] = content or None
            message["tool_calls"] = [call.as_json() for call in text.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._shown is None else _logprobs(text.tokens),
            "finish_reason": text.finish_reason,
        }


def _logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}
