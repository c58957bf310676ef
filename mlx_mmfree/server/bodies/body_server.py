"""Reads the bodies of requests inside the confined process, which limits its time and memory."""

from typing import Any

from ..errors import RequestError
from ..schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    checked_object,
    parsed_body,
)
from .messages import CountRequest, MessagesRequest
from .responses import ResponsesRequest

_KINDS: dict[str, type[Body]] = {
    kind.__name__: kind
    for kind in (
        ChatRequest,
        CompletionRequest,
        CountRequest,
        EmbeddingRequest,
        MessagesRequest,
        ResponsesRequest,
    )
}
_OF_IDS = (CompletionRequest, EmbeddingRequest)
MOST_VALUES = 100_000
"""The most values of a request, without token ids."""


def handle(request: tuple[str, bytes, int]) -> dict[str, Any]:
    """Parses and checks a body.

    Args:
        request: The name of its schema, the body, and the most bytes of one.

    Returns:
        The `value` without the contents of hints, or with `refused` the arguments of the error.
    """
    name, text, max_bytes = request
    kind = _KINDS[name]
    try:
        value = parsed_body(text, max_bytes)
        checked_object(kind, value)
        # the names of hints go to the log, and their values nowhere
        value |= dict.fromkeys(kind.hints & value.keys())
        count = _count(value, kind in _OF_IDS)
        if count > MOST_VALUES:
            raise RequestError(
                f"[request] the body must hold at most {MOST_VALUES:,} values beside token ids but "
                f"holds {count:,}.",
                413,
                code="body_too_large",
            )
    except RequestError as error:
        return {"refused": [str(error), error.status, error.param, error.code]}
    return {"value": value}


def _count(value: Any, has_ids: bool) -> int:
    """The number of values in a value, itself included.

    Args:
        value: The value.
        has_ids: Whether lists of nothing but integers are token ids, which do not count.
    """
    count, values = 0, [value]
    while values:
        value = values.pop()
        count += 1
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            are_ids = has_ids and all(type(item) is int for item in value)
            values += [] if are_ids else value
    return count
