"""Many clients of all dialects that leave at random, and kills: nothing is lost or seen by another."""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_mmfree.hub import save_model
from tests.server.conftest import CALLING, with_template
from tests.server.process import ServerProcess

pytestmark = [pytest.mark.serve, pytest.mark.slow]

CLIENTS, ROUNDS = 256, 6
HEADERS = {"Authorization": "Bearer k"}
# the model answers each conversation with what that alone says
FIRST = """
import re
from tests.server.stand_in import dictate
def answer(conversation):
    return f"Yours is {re.findall('secret-[0-9]+', conversation)[-1]}.<|eot_id|>"
told = dictate(answer)
told.__enter__()
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    root = tmp_path_factory.mktemp("many")
    model, _ = with_template(root / "tokenizer", CALLING)
    save_model(root / "m", model, root / "tokenizer")
    yield [
        *("--model", root / "m", "--api-key", "k", "--max-waiting", "400"),
        *(
            "--session-dir",
            root / "sessions",
            "--session-memory",
            "2MB",
            "--kept-responses",
            "5000",
        ),
    ]


@dataclass
class Seen:
    """The answers that the clients have had.

    Attributes:
        stored: The secret of each response that came whole and is kept.
        texts: How many texts were looked at.
        left: How many answers were left.
    """

    stored: dict[str, str] = field(default_factory=dict)
    texts: int = 0
    left: int = 0


def request(draw: random.Random, secret: str, before: str | None) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": f"Mine is {secret}. {'Well. ' * draw.randrange(20)}"}]
    body: dict[str, Any] = {"model": "m", "stream": draw.random() < 0.7}
    path = draw.choice(("chat/completions", "messages", "responses", "responses"))
    if path == "responses":
        more = {} if before is None else {"previous_response_id": before}
        return path, body | {"input": messages, **more}
    return path, body | {"messages": messages, "max_tokens": 40}


async def client(http: Any, number: int, seen: Seen) -> None:
    draw, secret, before = random.Random(number), f"secret-{number:05}", None
    for _ in range(ROUNDS):
        path, body = request(draw, secret, before)
        chunks: list[str] = []
        chunks_until_gone = draw.choice((None, None, 0, 1, 3, 9))
        async with http.stream("POST", f"/v1/{path}", json=body) as response:
            if response.status_code == 429:
                continue
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if chunks_until_gone is not None and len(chunks) >= chunks_until_gone:
                    break
                chunks.append(line)
            else:
                chunks_until_gone = None
        text = "\n".join(chunks)
        # whatever came is the client's own
        assert set(re.findall(r"secret-\d{5}", text)) <= {secret}
        seen.texts += 1
        if chunks_until_gone is not None:
            seen.left += 1
        elif path == "responses":
            last = text.rpartition("data: ")[2] if body["stream"] else text
            made = json.loads(last)
            made = made.get("response", made)
            assert f"Yours is {secret}." in made["output"][0]["content"][0]["text"]
            before = made["id"]
            seen.stored[before] = secret


async def _all(url: str, seen: Seen, kill: ServerProcess | None = None) -> None:
    import httpx2

    limits = httpx2.Limits(max_connections=CLIENTS)
    async with httpx2.AsyncClient(
        base_url=url, headers=HEADERS, timeout=120, limits=limits
    ) as http:
        clients = [asyncio.create_task(client(http, n, seen)) for n in range(CLIENTS)]
        if kill is None:
            await asyncio.gather(*clients)
            return
        while len(seen.stored) < CLIENTS:
            await asyncio.sleep(0.01)
        kill.process.kill()
        for each in clients:
            # the server has gone in the middle
            with suppress(httpx2.HTTPError, json.JSONDecodeError):
                await each


def check_stored(url: str, seen: Seen) -> None:
    import httpx2

    with httpx2.Client(base_url=url, timeout=60) as http:
        for name, secret in seen.stored.items():
            address = f"/v1/responses/{name}"
            found = http.get(address, headers=HEADERS)
            assert found.status_code == 200, f"{name} is lost"
            items = http.get(f"{address}/input_items", headers=HEADERS).text
            assert set(re.findall(r"secret-\d{5}", found.text + items)) == {secret}
            assert http.get(address).status_code == 401


def wait_until_free(url: str) -> None:
    """The rows of those who have left are soon free."""
    import httpx2

    for _ in range(100):
        if not httpx2.get(f"{url}/health").json()["active"]:
            return
        time.sleep(0.1)
    raise AssertionError("Texts go on without a client.")


def test_clients_that_leave_see_their_own_texts(flags: list[Any]) -> None:
    seen = Seen()
    with ServerProcess(*flags, first=FIRST) as server:
        asyncio.run(_all(server.url, seen))
        check_stored(server.url, seen)
        wait_until_free(server.url)
    assert seen.texts == CLIENTS * ROUNDS and seen.left > CLIENTS and len(seen.stored) > CLIENTS


def test_a_kill_loses_nothing_that_was_reported(flags: list[Any]) -> None:
    seen = Seen()
    with ServerProcess(*flags, first=FIRST) as server:
        asyncio.run(_all(server.url, seen, kill=server))
    with ServerProcess(*flags, first=FIRST) as server:
        check_stored(server.url, seen)
        # conversations go on from what was kept, and sessions of the folder are sound
        again = Seen()
        asyncio.run(_all(server.url, again))
        check_stored(server.url, again)
    assert len(seen.stored) >= CLIENTS
