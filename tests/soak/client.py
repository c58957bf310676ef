"""One client of a soak: random requests one after the other, some of which it leaves early."""

import json
import random
from typing import Any

import httpx2

from tests.fuzz import dialects

_WORDS = (
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "little",
    "frog",
    "and",
    "bird",
    "the",
    "river",
)
_TEXT = "/v1/completions"
_EXPECTED = {200, 429}
_LONGEST = 600


def draw_body(draw: random.Random, known: list[str]) -> dict[str, Any]:
    """A request that a server must answer; `known` are texts that others began with."""
    body: dict[str, Any] = {
        "prompt": _prompt(draw, known),
        "max_tokens": draw.choice([1, 4, 16, 64, 128]),
        "temperature": draw.choice([0, 0.7, 1.3]),
        "stream": draw.random() < 0.7,
    }
    others: dict[str, Any] = {
        "top_p": draw.uniform(0.1, 1),
        "seed": draw.randrange(2**31),
        "n": draw.choice([1, 2, 3]),
        "stop": draw.sample(_WORDS, draw.randint(1, 3)),
        "logprobs": draw.randint(0, 5),
        "presence_penalty": draw.uniform(-1, 1),
        "frequency_penalty": draw.uniform(-1, 1),
        "logit_bias": {str(draw.randrange(500)): draw.uniform(-10, 10)},
    }
    for name in draw.sample(sorted(others), draw.randint(0, 3)):
        body[name] = others[name]
    return body


def _prompt(draw: random.Random, known: list[str]) -> str:
    words = " ".join(draw.choices(_WORDS, k=draw.choice([1, 10, 100, _LONGEST])))
    if known and draw.random() < 0.5:
        # a conversation that goes on, or one that is forked
        words = f"{draw.choice(known)[: 8 * _LONGEST]} {words}"
    known.append(words)
    del known[:-50]
    return words


def ask(client: httpx2.Client, body: dict[str, Any], draw: random.Random) -> str:
    """How one request ended.

    Raises:
        AssertionError: In a way that must not be.
        httpx2.HTTPError: The server has not answered.
    """
    if not body["stream"]:
        response = client.post(_TEXT, json=body)
        assert response.status_code in _EXPECTED, f"{response.status_code}: {response.text}"
        return "whole" if response.status_code == httpx2.codes.OK else "refused as busy"
    leaves_after = draw.choice([None, None, 0, 1, 5, 20])
    with client.stream("POST", _TEXT, json=body) as response:
        if response.status_code != httpx2.codes.OK:
            text = response.read().decode()
            assert response.status_code in _EXPECTED, f"{response.status_code}: {text}"
            return "refused as busy"
        data = [line for line in _lines(response, leaves_after)]
    if leaves_after is not None:
        return "left"
    assert data[-1] == "[DONE]", f"the last words of a stream were {data[-1]!r}"
    for each in data[:-1]:
        assert "error" not in json.loads(each), each
    return "streamed"


_REFUSED = {400, 404, 413}


def converse(client: httpx2.Client, draw: random.Random, kept: list[str]) -> str:
    """How a random conversation in one of the dialects ended; `kept` gets the names of responses.

    Raises:
        AssertionError: In a way that must not be.
        httpx2.HTTPError: The server has not answered.
    """
    path = draw.choice(dialects.PATHS)
    body = dialects.draw(path, draw, kept)
    leaves_after = draw.choice([None, None, 0, 1, 5]) if body.get("stream") else None
    with client.stream("POST", path, json=body) as response:
        if leaves_after is not None:
            _lines(response, leaves_after)
            return "left"
        text = response.read().decode()
    if response.status_code in _REFUSED:
        assert json.loads(text)["error"]["message"], text
        return "refused in words"
    assert response.status_code in _EXPECTED, f"{response.status_code}: {text}"
    if response.status_code != httpx2.codes.OK:
        return "refused as busy"
    if body.get("stream"):
        error = dialects.check_stream(path, text)
        assert error is None or "[request]" in error["message"], error
        return "streamed"
    if path == dialects.RESPONSES and body.get("store", True):
        kept.append(json.loads(text)["id"])
        del kept[:-50]
    return "whole"


def _lines(response: httpx2.Response, most: int | None) -> list[str]:
    """The data of a stream, or of its first pieces."""
    found: list[str] = []
    for line in response.iter_lines():
        if most is not None and len(found) >= most:
            break
        if line.startswith("data: "):
            found.append(line.removeprefix("data: "))
    return found
