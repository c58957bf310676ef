"""Large bodies and large answers, during which others ask for `/health` all the while.

None of them may wait for long, by the processor time that the server takes meanwhile, and the server may
not grow by much. Other load on the machine changes neither.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlx_mmfree.hub import save_model
from tests.fuzz.case import FuzzClass, Late
from tests.fuzz.classes.request_bodies import Refusal
from tests.server.conftest import CALLING, with_template

_BODY, _PATH, _LINK = "body", "path", "base"
_MOST_S, _MOST_MB = 0.05, 100
_TRIES = 3
"""How often a wait must be long: between two looks at the clock this process may itself have waited."""
_MOST_BYTES, _MOST_NAMES = 8_000_000, 200_000
_SIZES = (70_000, 500_000, 2_000_000, _MOST_BYTES - 1000)
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_ITEMS: tuple[Any, ...] = (
    *(1, -1, 0.5, None, True, "a", "", "<|eot_id|>", "\u00e4\U0001f600", [], {}, [[]], {"a": 1}),
    *([1], list(range(100)), _CALL, _TOOL, {"role": "user", "content": "a"}),
    *({"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}, {"a": {"b": [None]}}),
)
_CHAT, _MESSAGES = "/v1/chat/completions", "/v1/messages"
_RESPONSES, _COMPLETIONS = "/v1/responses", "/v1/completions"
_EMBEDDINGS = "/v1/embeddings"
_USER = {"role": "user", "content": "a"}
_BODIES: dict[str, tuple[Callable[[Any], dict[str, Any]], ...]] = {
    _CHAT: (
        lambda many: {"messages": many},
        lambda many: {"messages": [{"role": "user", "content": many}]},
        lambda many: {"messages": [_USER, {"role": "assistant", "tool_calls": many}, _USER]},
        lambda many: {"messages": [_USER], "tools": many},
        lambda many: {"messages": [_USER], "stop": many},
        lambda many: {"messages": [_USER], "chat_template_kwargs": {"a": many}},
        lambda many: {"messages": [{**_USER, "a": many}]},
        lambda many: {"messages": [_USER], "metadata": _keyed(many)},
        lambda many: {"messages": [_USER], "logit_bias": _keyed(many)},
        lambda many: {"messages": [_USER], **_keyed(many)},
        lambda many: {"messages": [_USER], "response_format": {"type": "json_schema", "a": many}},
    ),
    _MESSAGES: (
        lambda many: {"messages": many, "max_tokens": 1},
        lambda many: {"messages": [_USER], "system": many, "max_tokens": 1},
        lambda many: {"messages": [{"role": "user", "content": many}], "max_tokens": 1},
        lambda many: {"messages": [_USER], "tools": many, "max_tokens": 1},
    ),
    _RESPONSES: (
        lambda many: {"input": many},
        lambda many: {"input": [{"role": "user", "content": many}]},
        lambda many: {"input": "a", "include": many},
        lambda many: {"input": "a", "tools": many},
        lambda many: {"input": "a", "metadata": _keyed(many)},
    ),
    _COMPLETIONS: (
        lambda many: {"prompt": many},
        lambda many: {"prompt": "a", "stop": many},
        lambda many: {"prompt": "a", "a": many},
    ),
    _EMBEDDINGS: (lambda many: {"input": many}, lambda many: {"input": [many]}),
}


def _keyed(many: Any) -> dict[str, Any]:
    """So many names as a body holds, or one long text under one."""
    if isinstance(many, str):
        return {"a": many}
    return {str(number): item for number, item in enumerate(many[:_MOST_NAMES])}


def make_sources(folder: Path) -> None:
    """A model whose chat template writes calls."""
    model, _ = with_template(folder / "tokenizer", CALLING)
    save_model(folder / "m", model, folder / "tokenizer")


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes a body of many items, or of one long text, or one that asks for a large answer."""
    target.mkdir()
    (target / _LINK).symlink_to(sources / "m")
    path = rng.choice(tuple(_BODIES))
    kind = rng.choice(("many", "many", "many", "long", "answer"))
    size = rng.choice(_SIZES)
    if kind == "answer":
        path = rng.choice((_COMPLETIONS, _EMBEDDINGS))
        body = _answer(path, rng)
    elif kind == "long":
        text = rng.choice(("a", "a b ", "<|eot_id|>", "\u00e4", "\\", "0", "\n"))
        body = rng.choice(_BODIES[path])(text * (size // len(json.dumps(text)[1:-1])))
    else:
        item = rng.choice(_ITEMS)
        # some are sound before the first mistake
        count = max(1, size // (len(json.dumps(item, separators=(",", ":"))) + 1))
        many = [item] * count + ([rng.choice(_ITEMS)] if rng.random() < 0.3 else [])
        body = rng.choice(_BODIES[path])(many)
    data = json.dumps(body, separators=(",", ":")).encode()[:_MOST_BYTES]
    (target / _BODY).write_bytes(data)
    (target / _PATH).write_text(path)
    return f"{kind} for {path}, {len(data)} bytes: {data[:200]!r}"


def _answer(path: str, rng: random.Random) -> dict[str, Any]:
    if path == _EMBEDDINGS:
        texts = [rng.choice(("a", "a b c", [1, 2]))] * rng.choice((100, 2048))
        return {"input": texts, "encoding_format": rng.choice(("float", "base64"))}
    body = {"prompt": "a", "n": rng.choice((8, 128)), "max_tokens": rng.choice((20, 200, 700))}
    return body | {"logprobs": rng.choice((None, 0, 5, 20)), "stream": rng.random() < 0.3}


def exercise(folder: Path, rng: random.Random) -> None:
    """Sends the body while another connection asks for `/health`."""
    server = _server((folder / _LINK).resolve())
    body, path = (folder / _BODY).read_bytes(), (folder / _PATH).read_text()
    waits = []
    for _ in range(_TRIES):
        _forget_peak(server)
        before = server.resident_mb
        wait, status, answer = _asked(server, path, body)
        grown = _peak_mb(server) - before
        if status >= 500 or "Traceback" in server.log:
            raise AssertionError(f"status {status}: {answer[:300]!r} {server.log[-800:]}")
        if grown > _MOST_MB + 4 * len(answer) / 1e6:
            raise AssertionError(f"the server grew by {grown:.0f} MB")
        waits.append(wait)
        if wait <= _MOST_S:
            break
    else:
        raise Late(f"somebody waited for {min(waits):.3f} s of the server's processor time")
    if status != 200:
        raise Refusal(json.loads(answer)["error"]["message"])


def _asked(server: Any, path: str, body: bytes) -> tuple[float, int, bytes]:
    """The longest wait of others while a body is sent and answered, in the server's processor time."""
    waits, has_ended = [0.0], threading.Event()

    def ask() -> None:
        while not has_ended.is_set():
            begun = _used_s(server)
            status, answer = _call(server, "GET", "/health")
            waits.append(_used_s(server) - begun)
            assert status == 200, answer
            time.sleep(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        status, answer = _call(server, "POST", path, body)
    finally:
        has_ended.set()
        asking.join()
    return max(waits), status, answer


def _call(server: Any, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _used_s(server: Any) -> float:
    """The processor time of all threads of the server; 0 where the system does not say."""
    found = 0
    for thread in Path(f"/proc/{server.process.pid}/task").glob("*/schedstat"):
        try:
            found += int(thread.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            # it has ended
            continue
    return found / 1e9


def _forget_peak(server: Any) -> None:
    peak = Path(f"/proc/{server.process.pid}/clear_refs")
    if peak.exists():
        peak.write_text("5")


def _peak_mb(server: Any) -> float:
    status = Path(f"/proc/{server.process.pid}/status")
    if not status.exists():
        return 0.0
    [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1000


@cache
def _server(model: Path) -> Any:
    """A server that lives as long as this process and has answered a small and a large request."""
    from tests.server.process import ServerProcess

    server = ServerProcess("--model", model, first=_LIMITS)
    for words in ("a", "a" * 70_000):
        _call(server, "POST", _COMPLETIONS, json.dumps({"prompt": words, "n": 1}).encode())
    return server


# it lives longer than a case may take
_LIMITS = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""

CLASS = FuzzClass(
    make_sources,
    mutate,
    exercise,
    refusals=(Refusal,),
    cpu_seconds=30,
    batch=100_000,
    packages=("starlette", "llguidance", "uvicorn", "httpx2"),
)
