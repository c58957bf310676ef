"""Many requests at once: each is answered as if it were alone."""

import json
import random
import select
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from mlx_mmfree import demo
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.process import ServerProcess

pytestmark = pytest.mark.serve

COUNT = 60
TEXT = "Once upon a time there was a little fox who saw the old hen and ran home"


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body; what it is answered with is decided by them alone."""
    text = " ".join(rng.choices(TEXT.split(), k=rng.choice((1, 4, 30, 300))))
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 3, 12, 40)), "stream": rng.random() < 0.5}
    body |= rng.choice(
        (
            {"temperature": 0},
            {"temperature": 0.8, "seed": rng.randrange(100)},
            {"temperature": 1.3, "top_p": 0.9, "seed": rng.randrange(100), "n": 2},
            {"temperature": 1, "top_k": 20, "min_p": 0.02, "seed": 5},
        )
    )
    body |= rng.choice(
        ({}, {}, {"stop": [" the", "a"]}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1})
    )
    if rng.random() < 0.3:
        return "/v1/chat/completions", body | {
            "model": "chat",
            "messages": [{"role": "user", "content": text}],
        }
    return "/v1/completions", body | {"model": "demo", "prompt": text}


def answer(client: Any, request: tuple[str, dict[str, Any]]) -> list[tuple[str, str | None]]:
    """The texts of an answer, with the reasons of their ends."""
    path, body = request
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return [
            (c["text"] if "text" in c else c["message"]["content"], c["finish_reason"])
            for c in response.json()["choices"]
        ]
    texts = {n: "" for n in range(body.get("n", 1))}
    reasons: dict[int, str | None] = {}
    for event in events(response.text):
        for choice in event["choices"]:
            delta = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] += delta
            reasons[choice["index"]] = choice["finish_reason"]
    return [(texts[n], reasons[n]) for n in texts]


def test_requests_to_two_models_are_answered_as_alone(start: Callable[..., Any]) -> None:
    rng = random.Random(7)
    requests = [random_request(rng) for _ in range(COUNT)]
    with start(max_rows=8, prefill_step_size=64) as client, ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda request: answer(client, request), requests))
    with start(max_rows=1) as client:
        alone = [answer(client, request) for request in requests]
    assert together == alone
    assert len({texts[0][0] for texts in alone}) > COUNT / 2


def test_clients_that_go_away_change_no_other_answer() -> None:
    rng = random.Random(8)
    requests = [random_request(rng) for _ in range(5 * COUNT)]
    requests = [request for request in requests if request[1]["model"] == "demo"][:200]
    leaving = {n for n in range(len(requests)) if rng.random() < 0.3}

    def ask(client: httpx2.Client, number: int, may_stop: bool) -> Any:
        path, body = requests[number]
        if number not in leaving:
            return answer(client, (path, body))
        if not may_stop:
            return None
        long = body | {"stream": True, "max_tokens": 2000, "stop": []}
        with client.stream("POST", path, json=long) as response:
            next(response.iter_lines())
        return None

    def answers(workers: int, *flags: str) -> list[Any]:
        with (
            ServerProcess(*flags) as server,
            httpx2.Client(base_url=server.url, timeout=300) as client,
            ThreadPoolExecutor(workers) as pool,
        ):
            numbers = range(len(requests))
            return list(pool.map(lambda number: ask(client, number, workers > 1), numbers))

    together = answers(24, "--decode-concurrency", "16", "--prefill-step-size", "64")
    alone = answers(1, "--decode-concurrency", "1", "--session-memory", "0")
    assert len(requests) == 200 and len(leaving) > 40
    assert together == alone


def test_others_go_on_while_large_prompts_are_read() -> None:
    # so large that only its tokens tell that there are too many
    least = Tokenizer.from_folder(demo.path()).least_tokens("a" * 10**6)
    large = json.dumps({"prompt": "a" * (32_000 * 10**6 // least), "max_tokens": 1}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(large)}\r\n\r\n"
    )
    small = {"prompt": "a", "max_tokens": 1}
    with ServerProcess() as server, ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=120))
        # the prompts of clients that leave are not read
        for _ in range(30):
            with server.connect() as connection:
                connection.sendall(head.encode() + large)
        connection = stack.enter_context(server.connect())
        connection.sendall(head.encode() + large)
        started = time.monotonic()
        waits = []
        while not select.select([connection], [], [], 0)[0]:
            begin = time.monotonic()
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=small).status_code == 200
            waits.append(time.monotonic() - begin)
        took = time.monotonic() - started
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
        assert max(waits) < max(0.8, took / 3)
        assert took < 30
