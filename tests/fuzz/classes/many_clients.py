"""Many clients at once, all of which a server must answer, and whose memory must stay flat.

They send requests of all sizes in all dialects, go on with and fork conversations, and leave many
answers early. A case is a few requests of each client to one server; thousands of cases take hours.
"""

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from mlx_mmfree.hub import save_model
from tests.fuzz import dialects
from tests.fuzz.case import FuzzClass
from tests.server.conftest import CALLING, with_template

_WORDS = "once upon a time there was little frog and bird the river".split()  # noqa: SIM905
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
    lines_until_gone = draw.choice([None, None, 0, 1, 5, 20])
    with client.stream("POST", _TEXT, json=body) as response:
        if response.status_code != httpx2.codes.OK:
            text = response.read().decode()
            assert response.status_code in _EXPECTED, f"{response.status_code}: {text}"
            return "refused as busy"
        data = [line for line in _lines(response, lines_until_gone)]
    if lines_until_gone is not None:
        return "left"
    assert data[-1] == "[DONE]", f"the last words of a stream were {data[-1]!r}"
    for each in data[:-1]:
        assert "error" not in json.loads(each), each
    return "streamed"


_REFUSED = {400, 404, 413}
_LINK, _SEED = "base", "seed.txt"
_CLIENTS, _REQUESTS = 16, 6
_CHATS = 0.8
_TIMEOUT_S, _QUIET_S = 120.0, 60.0
_LEAST_MEASURED = 30
_SHARE, _BYTES = 0.02, 8_000_000


def converse(client: httpx2.Client, draw: random.Random, stored: list[str]) -> str:
    """How a random conversation in one of the dialects ended; `stored` gets the names of responses.

    Raises:
        AssertionError: In a way that must not be.
        httpx2.HTTPError: The server has not answered.
    """
    path = draw.choice(dialects.PATHS)
    body = dialects.draw(path, draw, stored)
    lines_until_gone = draw.choice([None, None, 0, 1, 5]) if body.get("stream") else None
    with client.stream("POST", path, json=body) as response:
        if lines_until_gone is not None:
            _lines(response, lines_until_gone)
            return "left"
        text = response.read().decode()
    if response.status_code in _REFUSED:
        assert json.loads(text)["error"]["message"], text
        return "refused by a message"
    assert response.status_code in _EXPECTED, f"{response.status_code}: {text}"
    if response.status_code != httpx2.codes.OK:
        return "refused as busy"
    if body.get("stream"):
        error = dialects.check_stream(path, text)
        assert error is None or "[request]" in error["message"], error
        return "streamed"
    if path == dialects.RESPONSES and body.get("store", True):
        stored.append(json.loads(text)["id"])
        del stored[:-50]
    return "whole"


def _lines(response: httpx2.Response, most: int | None) -> list[str]:
    """The data of a stream, or of its first chunks."""
    found: list[str] = []
    for line in response.iter_lines():
        if most is not None and len(found) >= most:
            break
        if line.startswith("data: "):
            found.append(line.removeprefix("data: "))
    return found


def growth(memory: Sequence[float]) -> float:
    """By how much the last third of some measurements lies above the second, by the medians.

    Caches and threads arise in the first third.
    """
    third = len(memory) // 3
    return median(memory[-third:]) - median(memory[third:-third])


def is_flat(memory: Sequence[float]) -> bool:
    """Returns whether memory, in bytes, has stopped growing, but for small fluctuations."""
    third = len(memory) // 3
    return growth(memory) <= _SHARE * median(memory[third:-third]) + _BYTES


def make_sources(folder: Path) -> None:
    """A model whose chat template writes calls."""
    model, _ = with_template(folder / "tokenizer", CALLING)
    save_model(folder / "m", model, folder / "tokenizer")


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Draws what the clients draw their requests by."""
    target.mkdir()
    (target / _LINK).symlink_to(sources / "m")
    seed = rng.getrandbits(64)
    (target / _SEED).write_text(str(seed))
    return f"requests of seed {seed}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Lets all clients ask, waits until nothing goes on, and looks at the server's memory."""
    server, known, stored, memory = _server((folder / _LINK).resolve())
    seed = (folder / _SEED).read_text()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(partial(_run, server.url, known, stored, seed), range(_CLIENTS)))
    deadline = time.monotonic() + _QUIET_S
    while active := httpx2.get(f"{server.url}/health").json()["active"]:
        assert time.monotonic() < deadline, f"{active} texts go on without a client"
        time.sleep(0.01)
    assert "Traceback" not in server.log, server.log[-1500:]
    memory.append(1e6 * server.resident_mb)
    if len(memory) >= _LEAST_MEASURED and not is_flat(memory):
        raise AssertionError(f"the server grew by {growth(memory) / 1e6:.1f} MB")


def _run(url: str, known: list[str], stored: list[str], seed: str, number: int) -> None:
    """The requests of one client."""
    draw = random.Random(f"{seed} {number}")
    with httpx2.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for _ in range(_REQUESTS):
            if draw.random() < _CHATS:
                converse(client, draw, stored)
            else:
                ask(client, draw_body(draw, known), draw)


@cache
def _server(model: Path) -> tuple[Any, list[str], list[str], list[float]]:
    """A server that lives as long as this process, what it was asked, and its memory after each case."""
    from tests.server.process import ServerProcess

    # the sessions' limit is reached soon, so that old ones go all the time
    flags = ("--model", model, "--session-memory", "2MB", "--decode-concurrency", "16")
    return ServerProcess(*flags, first=_LIMITS), [], [], []


# it lives longer than a case may take
_LIMITS = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""

CLASS = FuzzClass(
    make_sources,
    mutate,
    exercise,
    refusals=(),
    cpu_seconds=30,
    batch=100_000,
    count=3,
    packages=("starlette", "llguidance", "uvicorn", "httpx2"),
)
