"""Answers that are written as JSON row by row."""

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.responses import StreamingResponse

from mlx_mmfree.generation.scheduling import TokenLogprobs
from mlx_mmfree.server.answers import Steps
from mlx_mmfree.server.json_rows import json_response

pytestmark = pytest.mark.serve


def test_iterators_become_lists_in_small_chunks() -> None:
    rows = [{"a": number, "é": ["x" * 100]} for number in range(5000)]
    content = {"head": 1, "rows": iter(rows), "in": {"no": iter([]), "two": iter([iter([1, 2])])}}
    response = json_response(content)
    assert isinstance(response, StreamingResponse)

    async def read() -> list[Any]:
        return [chunk async for chunk in response.body_iterator]

    chunks = asyncio.run(read())
    assert len(chunks) > 5 and max(map(len, chunks)) < 100_000
    expected = {"head": 1, "rows": rows, "in": {"no": [], "two": [[1, 2]]}}
    assert json.loads(b"".join(chunks)) == expected
    assert json.loads(bytes(json_response(expected).body)) == expected


def test_steps_are_kept_as_they_are() -> None:
    reported = [
        (n, TokenLogprobs(n, -n / 3, tuple((n + k, -k / 7) for k in range(n)))) for n in range(5)
    ]
    steps = Steps()
    steps.add(reported[:2])
    steps.add(reported[2:])
    assert list(steps) == reported == list(steps)
