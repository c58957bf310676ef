"""Large answers, which are written as JSON row by row while the client reads them."""

import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

_CHUNK = 65_536
encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_response(content: dict[str, Any]) -> Response:
    """The response with an object.

    Iterators in it and in its objects are written as lists, on another thread, and item by item: neither
    the event loop nor the interpreter is held for long, and no more than a chunk lies in memory.
    """
    if not _has_rows(content):
        return JSONResponse(content)
    return StreamingResponse(_chunks(content), media_type="application/json")


def _has_rows(value: Any) -> bool:
    return isinstance(value, Iterator) or (
        isinstance(value, dict) and any(map(_has_rows, value.values()))
    )


def _chunks(value: Any) -> Iterator[bytes]:
    parts: list[str] = []
    size = 0
    for part in _parts(value):
        parts.append(part)
        size += len(part)
        if size >= _CHUNK:
            yield "".join(parts).encode()
            parts.clear()
            size = 0
    yield "".join(parts).encode()


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, Iterator):
        yield "["
        for number, item in enumerate(value):
            yield "," if number else ""
            yield from _parts(item)
        yield "]"
    elif _has_rows(value):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield ("," if number else "") + encode(name) + ":"
            yield from _parts(item)
        yield "}"
    else:
        yield encode(value)
