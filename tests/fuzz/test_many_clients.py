"""The class of many clients sees memory that grows, and asks only what must be answered."""

import random
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from tests.fuzz.classes import many_clients as clients
from tests.fuzz.classes.many_clients import growth, is_flat

_MB = 10**6


@pytest.mark.parametrize(
    ("memory", "flat"),
    [
        ([300 * _MB + 5 * _MB * (n % 2) for n in range(300)], True),
        # caches and threads arise at the start
        ([100 * _MB, *[400 * _MB] * 200], True),
        # 1 MB a second
        ([(300 + n) * _MB for n in range(300)], False),
    ],
    ids=["up and down", "prefix", "leak"],
)
def test_growth_is_seen(memory: list[int], flat: bool) -> None:
    assert is_flat(memory) is flat


def test_growth_is_that_of_the_last_third() -> None:
    assert growth([0, 0, 0, 10, 10, 10, 25, 25, 25]) == 15


def test_conversations_go_on() -> None:
    draw = random.Random(1)
    known: list[str] = []
    prompts = [clients.draw_body(draw, known)["prompt"] for _ in range(40)]
    goes_on = [later for n, later in enumerate(prompts) if later.startswith(tuple(prompts[:n]))]
    assert 5 < len(goes_on) < 40


class _Stays(random.Random):
    """Draws what comes first: a client that reads its answer to the end."""

    def choice(self, options: Sequence[Any]) -> Any:
        return options[0]


def _ask(status: int, text: str, stream: bool) -> str:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, text=text))
    with httpx2.Client(transport=transport, base_url="http://server") as client:
        return clients.ask(client, {"stream": stream}, _Stays())


@pytest.mark.parametrize(
    ("status", "text", "stream", "end"),
    [
        (200, "{}", False, "whole"),
        (200, "data: {}\n\ndata: [DONE]\n\n", True, "streamed"),
        (429, "later", False, "refused as busy"),
        (429, "later", True, "refused as busy"),
    ],
)
def test_what_may_happen(status: int, text: str, stream: bool, end: str) -> None:
    assert _ask(status, text, stream) == end


@pytest.mark.parametrize(
    ("status", "text", "stream"),
    [
        (500, "", False),
        (500, "", True),
        (400, "refused", False),
        (200, "data: {}\n\n", True),
        (200, 'data: {"error": "failed"}\n\ndata: [DONE]\n\n', True),
    ],
    ids=["500", "500 of a stream", "400", "broken off", "an error on the way"],
)
def test_what_must_not_happen(status: int, text: str, stream: bool) -> None:
    with pytest.raises(AssertionError):
        _ask(status, text, stream)
