"""Anthropic's interface: `/v1/messages` and `/v1/messages/count_tokens`."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..generation.answers.answer_parts import Block, Change
from ..generation.scheduling import Event
from .answers import Answer, Sent, TextParts, Usage
from .bodies.messages import CountRequest, MessagesRequest
from .chat import Conversation, chat_endpoint, read
from .errors import ANTHROPIC, RequestError
from .service import Endpoint, Service

VERSIONS = ("2026-10-21", "2023-06-01")
"""The values of the header `anthropic-version` whose format this is; the later one has no sampling."""


class MessagesAnswer(Answer):
    """A message that answers a conversation.

    Args:
        body: The request.
        found: What is written for it.
    """

    def __init__(self, body: MessagesRequest, found: Conversation):
        self.usage = Usage(texts_a_prompt=1)
        self._body = body
        self._parts = TextParts(found.make_reader())
        (text,) = found.texts
        self._prompt_tokens = len(text.tokens)
        self._is_cut = text.max_tokens < body.max_tokens
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": found.served.name,
        }

    def opening(self) -> list[Sent]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        nothing: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [{"type": "message_start", "message": self._head | nothing}, *self.waiting()]

    def waiting(self) -> list[Sent]:
        return [{"type": "ping"}]

    def _added(self, index: int, events: Sequence[Event]) -> list[Sent]:
        return [_sent(change) for change in self._parts.add(events)]

    def closing(self) -> list[Sent]:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: RequestError) -> list[Sent]:
        return [error.body(ANTHROPIC)]

    def whole(self) -> Sent:
        content = {"content": [_shown(block) for block in self._parts.blocks.whole]}
        return self._head | content | self._end() | {"usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        blocks = self._parts.blocks
        assert blocks.finish is not None and blocks.reason is not None
        if blocks.reason == "stop" and blocks.finish.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": blocks.finish.stop_string}
        full = "model_context_window_exceeded" if self._is_cut else "max_tokens"
        reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": full}
        return {"stop_reason": reasons[blocks.reason], "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        cached = self.usage.cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion_tokens,
        }


def _shown(block: Block) -> dict[str, Any]:
    """A block as a message has it."""
    if block.kind == "tool_call":
        arguments = json.loads(block.text or "{}")
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _sent(change: Change) -> Sent:
    """The event of a stream for a change."""
    if change.kind == "begin":
        block = _shown(change.block)
        return {"type": "content_block_start", "index": change.index, "content_block": block}
    if change.kind == "end":
        return {"type": "content_block_stop", "index": change.index}
    kind, name = _DELTAS[change.block.kind]
    delta = {"type": kind, name: change.block.text}
    return {"type": "content_block_delta", "index": change.index, "delta": delta}


_NAMES = {"stop": "stop_sequences", "response_format": "output_config"}


def messages(service: Service) -> Endpoint:
    """The endpoint that answers conversations."""
    answer = chat_endpoint(
        service,
        MessagesRequest,
        MessagesRequest.as_chat,
        MessagesAnswer,
        names=_NAMES,
        # the limit of tokens is a bound here, and not what must fit
        caps_length=True,
    )

    async def endpoint(request: Request) -> Response:
        _check_version(request)
        return await answer(request)

    return endpoint


def count_tokens(service: Service) -> Endpoint:
    """The endpoint that counts the tokens of conversations."""

    def count(body: CountRequest) -> int:
        try:
            _, prompt, _ = read(service, body.as_chat())
        except RequestError as error:
            raise error.renamed(_NAMES) from error
        return len(prompt.tokens)

    async def endpoint(request: Request) -> Response:
        _check_version(request)
        return JSONResponse({"input_tokens": await service.prepared(request, CountRequest, count)})

    return endpoint


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        raise RequestError(
            f"[request] the header 'anthropic-version' must be {' or '.join(VERSIONS)} but is "
            f"{version!r:.60}."
        )
