"""Grammars of requests: what takes too much ends alone, and what is known is not compiled again."""

import asyncio
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import llguidance
import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.hub import Tokenizer, save_model
from mlx_mmfree.models import Decoder
from mlx_mmfree.platform.confinement import process
from mlx_mmfree.platform.confinement.process import Branch, _Running
from mlx_mmfree.server.errors import RequestError
from mlx_mmfree.server.settings import ServedModel
from mlx_mmfree.server.tool_calls import grammar
from mlx_mmfree.server.tool_calls.grammar import Grammar, Grammars, Lanes
from mlx_mmfree.server.tool_calls.sources import json_source
from tests.hub.checkpoints import GOLDENS, edit_json
from tests.server.conftest import with_template
from tests.server.process import ServerProcess
from tests.server.test_process import wait_until

pytestmark = pytest.mark.serve

CHAT = "/v1/chat/completions"
SMALL = {
    "type": "object",
    "properties": {
        "the name": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["fox", "hen", "foxes"]},
        "many": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
    },
    "required": ["the name", "kind", "many"],
    "additionalProperties": False,
}


# knows calls, and says little of them
TEMPLATE = """{% if tools %}{{ 'Write {"name": …, "arguments": …} in <tool_call></tool_call>' }}
{% endif %}{{ messages[0].content }}"""


@pytest.fixture(scope="module")
def tools_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    """A random model that is taught to call tools."""
    return with_template(tmp_path_factory.mktemp("tools") / "m", TEMPLATE)


@pytest.fixture(scope="module")
def client(start: Callable[..., Any], tools_model: tuple[Decoder, Tokenizer]) -> Iterator[Any]:
    """A client of a server of that model, which is called `m`."""
    with start(ServedModel("m", *tools_model)) as client:
        yield client


def chain(depth: int, link: Callable[[dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """Definitions each of which refers to the next."""
    definitions = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(depth)}
    return {"$defs": definitions | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def all_of(patterns: list[str]) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


# takes gigabytes and minutes
HEAVY = all_of([f".*{chr(97 + n)}.*" for n in range(20)])
HOSTILE = {
    "objects": chain(5000, lambda next_: {"type": "object", "properties": {"a": next_}}),
    "choices": chain(5000, lambda next_: {"anyOf": [{"type": "null"}, next_]}),
    "lists": chain(5000, lambda next_: {"type": "array", "items": next_}),
    "patterns": HEAVY,
    "names": {"type": "object", "patternProperties": {}, "propertyNames": HEAVY},
    "numbers": {"enum": [n * 7919 % 1_000_003 for n in range(90_000)]},
    "divisors": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]},
}


def body(schema: Any, param: str = "response_format", **more: Any) -> dict[str, Any]:
    """A request with a schema."""
    messages = [{"role": "user", "content": "x"}]
    asked: dict[str, Any] = {"messages": messages, "model": "m", "max_tokens": 3} | more
    if param == "tools":
        function = {"name": "f", "parameters": {"properties": {"a": schema}}}
        if "$defs" in schema:
            function["parameters"] = schema
        tools = [{"type": "function", "function": function}]
        return asked | {"tools": tools, "tool_choice": "required"}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return asked | {"response_format": format}


@pytest.mark.parametrize("param", ["response_format", "tools"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_that_takes_too_much_is_refused(client: Any, name: str, param: str) -> None:
    response = client.post(CHAT, json=body(HOSTILE[name], param))
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["code"]) == (param, "invalid_json_schema")
    assert f"'{param}' must have a schema that" in error["message"]
    assert client.post(CHAT, json=body(SMALL, param)).status_code == 200


def test_limits_are_reported(client: Any) -> None:
    message = client.post(CHAT, json=body(HEAVY)).json()["error"]["message"]
    assert "compiles within 1 s and 100 MB" in message and "simpler patterns" in message


@pytest.mark.parametrize(
    "format",
    [{"name": "x"}, {"name": "x", "schema": None}, {"name": "x", "schema": True}],
    ids=["none", "null", "true"],
)
def test_without_a_schema_any_json_will_do(client: Any, format: dict[str, Any]) -> None:
    more = {"temperature": 1.5, "max_tokens": 12, "n": 8, "seed": 1}
    whole = client.post(CHAT, json=body({}, **more)).json()["choices"]
    response = client.post(
        CHAT, json=body({}, **more, response_format={"type": "json_schema", "json_schema": format})
    )
    assert response.json()["choices"] == whole
    assert any(not each["message"]["content"].startswith("{") for each in whole)


@pytest.fixture
def grammars(chat_model: tuple[Decoder, Tokenizer]) -> Iterator[Grammars]:
    """Grammars for the tokenizer of the chat model."""
    lanes = Lanes()
    made = Grammars(chat_model[1], chat_model[0].vocab_size, lanes, lambda: None)
    yield made
    made.close()
    lanes.close()


def compiled(grammars: Grammars, schema: Any) -> Grammar:
    return asyncio.run(grammars.compiled(json_source(schema)))


class _Vocabulary:
    """The tokenizer as llguidance takes it, in this process."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_tokens.values())

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_continuation(text.decode())


def written(
    grammar_of_text: Grammar, tokenizer: Tokenizer, seed: int, most: int
) -> Iterator[tuple[Any, int]]:
    """A text that follows a grammar at random: which tokens were allowed, and the one chosen."""
    rng = random.Random(seed)
    state = grammar_of_text.start(mx.zeros((1, 1), mx.int32), None, tokenizer.vocab_size)
    for _ in range(most):
        logits = grammar_of_text(mx.zeros((1, tokenizer.vocab_size)), state)
        allowed = np.isfinite(np.array(logits)[0])
        token = rng.choice(np.flatnonzero(allowed).tolist())
        yield allowed, token
        state = grammar_of_text.update(state, mx.array([token]))


@pytest.mark.parametrize(
    "schema",
    [
        SMALL,
        {},
        {"type": "object"},
        {"type": "string", "pattern": "(a|bc)+[0-9]{2,4}", "maxLength": 30},
        {"const": "what must follow \u4e00 word by word " * 8},
        {"anyOf": [{"const": "one thing"}, {"const": "one other thing"}, {"type": "null"}]},
        {"type": "string", "format": "date-time"},
    ],
)
def test_the_tokens_are_those_that_llguidance_allows(
    grammars: Grammars, chat_model: tuple[Decoder, Tokenizer], schema: Any
) -> None:
    tokenizer = chat_model[1]
    ends = sorted(tokenizer.eos_token_ids)
    reference = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=ends
    )
    source = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": r"( |\n {0,12})?"}
    )
    first = compiled(grammars, schema)
    for seed in range(2):
        matcher = llguidance.LLMatcher(reference, source, log_level=0)
        for allowed, token in written(first.copy(), tokenizer, seed, 80):
            if matcher.is_stopped():
                assert np.flatnonzero(allowed).tolist() == ends
                break
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(mask, count=tokenizer.vocab_size, bitorder="little")
            assert np.array_equal(allowed, bits.astype(bool))
            assert matcher.consume_token(token)


def test_more_than_is_cut_ahead_can_follow(
    grammars: Grammars, chat_model: tuple[Decoder, Tokenizer]
) -> None:
    text = "a word and another one, " * 100
    tokenizer = chat_model[1]
    chosen = [
        token for _, token in written(compiled(grammars, {"const": text}), tokenizer, 0, 2000)
    ]
    end = min(chosen.index(number) for number in tokenizer.eos_token_ids if number in chosen)
    assert json.loads(tokenizer.decode(chosen[:end])) == text
    assert chosen[:end] == tokenizer.encode_continuation(json.dumps(text))


def test_what_is_known_is_not_compiled_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[float] = []
    run = grammar._Compilation.run

    def counted(self: Any, seconds: float) -> dict[str, Any]:
        runs.append(seconds)
        return run(self, seconds)

    monkeypatch.setattr(grammar._Compilation, "run", counted)

    async def several(schema: Any) -> list[Any]:
        tasks = (grammars.compiled(json_source(schema)) for _ in range(5))
        return await asyncio.gather(*tasks, return_exceptions=True)

    for _ in range(2):
        assert all(isinstance(each, Grammar) for each in asyncio.run(several(SMALL)))
    assert len(runs) == 1
    for _ in range(2):
        assert all(isinstance(each, RequestError) for each in asyncio.run(several(HEAVY)))
    # soon, and then with all the time that there is
    assert runs[1:] == [grammar._QUICK_SECONDS, grammar.COMPILATION.seconds]
    # a process that was killed is not taken
    (known, _) = next(iter(grammars._cached.values()))
    assert known.process_id is not None
    os.kill(known.process_id, signal.SIGKILL)
    second = compiled(grammars, SMALL)
    with pytest.raises(RequestError, match="while the text was written"):
        second(mx.zeros((1, 600)), second.start(mx.zeros((1, 1), mx.int32), None, 600))
    assert isinstance(compiled(grammars, SMALL), Grammar) and len(runs) == 4


def test_few_grammars_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(grammars, {"const": -1})
    for number in range(12):
        compiled(grammars, {"const": number})
    assert len(grammars._cached) == grammar._MOST_CACHED
    # what a text is written by stays with it
    assert np.isfinite(np.array(first(mx.zeros((1, 600)), mx.array([grammar._NONE])))).any()
    monkeypatch.setattr(grammar, "_MOST_CACHED_MB", 1)
    compiled(grammars, {"enum": [f"{n:x}" for n in range(20_000)]})
    assert sum(nbytes for _, nbytes in grammars._cached.values()) <= 2**20


def test_the_vocabulary_is_read_again_where_its_process_died(grammars: Grammars) -> None:
    compiled(grammars, SMALL)
    first = grammars._process.process_id
    running = grammars._process._running
    assert isinstance(running, _Running)
    running.process.kill()
    running.process.wait()
    assert isinstance(compiled(grammars, {"const": 1}), Grammar)
    assert grammars._process.process_id not in (first, None)


def test_a_compilation_that_nobody_waits_for_ends(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_QUICK_SECONDS", 1000.0)
    begun = threading.Event()

    class Noted(Branch):
        def ask(self, *arguments: Any) -> dict[str, Any]:
            begun.set()
            return super().ask(*arguments)

    monkeypatch.setattr(process, "Branch", Noted)

    async def abandon() -> None:
        waiting = [
            asyncio.create_task(grammars.compiled(json_source({**HEAVY, "title": f"{n}"})))
            for n in range(30)
        ]
        await asyncio.to_thread(begun.wait)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # none takes a row any more
        await grammars.compiled(json_source({"const": 1}))

    asyncio.run(asyncio.wait_for(abandon(), 120))


def test_a_text_whose_process_fails_ends_alone(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar is harmless, and to follow it gets no time or memory."""
    monkeypatch.setattr(grammar, "FOLLOWING", replace(grammar.FOLLOWING, memory_bytes=0))
    endless = {"type": "array", "items": {"enum": [f"{n:x}" for n in range(3000)]}}
    response = client.post(CHAT, json=body(endless, max_tokens=400, temperature=1))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "while the text was written, it" in error["message"]
    free = {"messages": [{"role": "user", "content": "x"}], "model": "m", "max_tokens": 3}
    assert client.post(CHAT, json=free).status_code == 200


@pytest.fixture(scope="module")
def server(
    tools_model: tuple[Decoder, Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served") / "m"
    save_model(folder, tools_model[0], GOLDENS / "tokenizer_bpe")
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    with ServerProcess("--model", folder) as server:
        yield server


def post(server: ServerProcess, asked: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{server.url}{CHAT}", json=asked, timeout=120)


def test_clients_that_go_away_take_no_row(server: ServerProcess) -> None:
    assert post(server, body(SMALL, model=None)).status_code == 200
    clients = []
    for number in range(20):
        content = json.dumps(body({**HEAVY, "title": f"left {number}"}, model=None)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client = socket.create_connection(urlsplit(server.url).netloc.split(":"))
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        clients.append(client)
    for client in clients:
        client.close()
    # all at once, though each would take a second of the one that compiles
    left = f'mmfree_requests_total{{path="{CHAT}",status="499"}} 20.0'
    wait_until(lambda: left in httpx2.get(f"{server.url}/metrics").text)
    assert post(server, body({"const": "new"}, model=None)).status_code == 200


def test_hostile_requests_hinder_nobody_and_no_end(server: ServerProcess) -> None:
    asked = [
        body({**HEAVY, "title": f"{number}"}, param, model=None)
        for number in range(20)
        for param in ("response_format", "tools")
    ]
    assert post(server, body(SMALL, model=None)).status_code == 200
    codes: list[int] = []

    def ask(hostile: dict[str, Any]) -> None:
        codes.append(post(server, hostile).status_code)

    threads = [threading.Thread(target=ask, args=(hostile,)) for hostile in asked]
    for thread in threads:
        thread.start()
    wait_until(lambda: 400 in codes)
    # what is known and what is free are answered while the others wait
    assert post(server, body(SMALL, model=None)).status_code == 200
    free = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert post(server, free).status_code == 200
    assert len(codes) < len(asked)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert set(codes) == {400, 429, 503}
    assert server.wait() == 0
    assert "Traceback" not in server.log
