"""Hostile connections to the server: odd headers, framing and bytes, too much, or too slowly.

Many connections are open at a time. Each must be answered or closed soon, and one server takes all of
them within its memory.
"""

import json
import random
import select
import socket
import time
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz.case import FuzzClass
from tests.fuzz.hostile import damage_bytes, odd_text

_SCRIPT = "script.json"
_LIMITS = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
from mlx_mmfree.server import run, service, settings
settings.HEAD_SECONDS = settings.UNREAD_SECONDS = run._KEEP_ALIVE_S = 2
service.BODY_SECONDS = 2
run.MOST_CONNECTIONS = 256
"""
_SECONDS = 20.0
"""Time in which a connection must be answered or closed, with limits of 2 s."""
_MOST_MB = 300
_MOST_SENT = 64 * 2**20
_KEY = "k"
_BODY = b'{"prompt": "a", "max_tokens": 1}'
_LINES = (b"GET /health HTTP/1.1", b"GET /v1/models HTTP/1.1", b"POST /v1/completions HTTP/1.1")
_HEADERS = (
    *(b"Host", b"Origin", b"Referer", b"Authorization", b"Content-Type", b"Content-Length"),
    *(b"Transfer-Encoding", b"Connection", b"Upgrade", b"Expect", b"Accept", b"Cookie", b"Range"),
    *(b"X-Forwarded-For", b"X-Forwarded-Proto", b"X-Forwarded-Host", b"Forwarded", b"Via", b"TE"),
    *(b"Access-Control-Request-Method", b"Access-Control-Request-Headers", b"Trailer", b"", b"a b"),
)
_VALUES = (
    *(b"", b" ", b"http://[", b"http://[::1", b"http://]", b"[", b"[::1", b"[::1]:99999", b"//"),
    *(b"localhost", b"127.0.0.1:-1", b"a@localhost", b"localhost, evil.example", b"http://a:b:c", b"*"),
    *(b"\xff\xfe", b"\x00", b"a\x0bb", b"a\rb", b"a\n b", b"\xe4\xbd\xa0", b"%00", b"${x}", b"{{ 7 }}"),
    *(b"Bearer k", b"bearer  k ", b"Bearer", b"Bearer \xff", b"Basic k", b"Bearer k, Bearer x"),
    *(b"chunked", b"chunked, chunked", b"gzip, chunked", b"identity", b"xchunked", b"chunked\x0b"),
    *(b"0", b"-1", b"+1", b"1e3", b"0x10", b"1_0", b"32", b"31", b"9" * 20, b"1, 1", b"\xb2", b"null"),
    *(b"close", b"keep-alive, close", b"Upgrade", b"websocket", b"h2c", b"100-continue", b"200-ok"),
    *(b"application/json", b"application/json; charset=\xff", b"text/plain", b"application/json" * 90),
    *(b"for=[::1", b"for=\"[\"", b"bytes=0-", b"a" * 9000, b"a" * 70_000),
)  # fmt: skip
_TARGETS = (
    *(b"/", b"*", b"", b"//", b"///health", b"/../../etc/passwd", b"/%2e%2e/%00", b"/v1/models/%ff%fe"),
    *(b"http://[", b"http://[::1/health", b"http://evil.example/health", b"localhost:80", b"/health/"),
    *(b"/health?\xff", b"/health?%zz", b"/health#a", b"/\xe4", b"/v1/models/?\xff", b"/v1//models"),
    *(b"/" + b"a" * 8000, b"/" + b"a" * 9000, b"/health?" + b"a=b&" * 2500),
    b"/v1/models/" + b"%41" * 2000,
)  # fmt: skip
_METHODS = (
    b"GET",
    b"HEAD",
    b"POST",
    b"OPTIONS",
    b"CONNECT",
    b"PRI",
    b"get",
    b"STEAL",
    b"",
    b"G\x00T",
)
_VERSIONS = (
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/9.9",
    b"HTTP/1.1 x",
    b"",
    b"http/1.1",
)
_CHUNKS = (
    *(b"0\r\n\r\n", b"20\r\n" + _BODY + b"\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"g\r\n", b"\r\n"),
    *(b"2;a=b\r\n{}\r\n", b"2 \r\n{}\r\n", b"2\n{}\n", b"0\r\nX: y\r\n\r\n", b"0\r\nHost: a\r\n\r\n"),
    *(b"f" * 40 + b"\r\n", b"1;" + b"a" * 70_000 + b"\r\n{\r\n", b"3\r\n{}\r\n", b"0" * 3000),
)  # fmt: skip
# the start, and what follows without end
_ENDLESS = (
    (b"GET /", b"a" * 65_536),
    (b"GET / HTTP/1.1\r\nX: ", b"a" * 65_536),
    (b"GET / HTTP/1.1\r\n", b"a" * 65_536),
    (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
    (b"GET / HTTP/1.1\r\nX: a\r\n", b" b\r\n" * 10_000),
    (b"", b"\r\n" * 30_000),
    (b"", b"\x00" * 65_536),
    (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1500),
    (b"CHUNKED", b"1;" + b"a" * 65_536),
    (b"CHUNKED2;x=", b"a" * 65_536),
    (b"CHUNKED0\r\nX: ", b"a" * 65_536),
    (b"CHUNKED0\r\n", b"a: b\r\n" * 10_000),
    (b"CHUNKED", b"1\r\na\r\n" * 10_000),
    (b"CHUNKED", b"10000\r\n" + b"a" * 65_536 + b"\r\n"),
)
_KINDS = (
    *(
        "bytes",
        "bytes",
        "headers",
        "headers",
        "headers",
        "line",
        "chunks",
        "noise",
        "ahead",
        "endless",
    ),
    *("half", "half", "slowly", "nothing", "unread"),
)
_left_open: deque[tuple[float, socket.socket, str]] = deque()


class Refusal(Exception):
    """The message of an answer that refuses a request."""


def make_sources(folder: Path) -> None:
    """Nothing: the server has the bundled model."""


def _request(rng: random.Random, *more: bytes, line: bytes | None = None) -> bytes:
    """A sound request, with further headers."""
    line = line or rng.choice(_LINES)
    headers = [b"Host: localhost", b"Content-Type: application/json"]
    headers += [b"Authorization: Bearer k"] if rng.random() < 0.7 else []
    body = _BODY if line.startswith(b"POST") else b""
    headers += [b"Content-Length: %d" % len(body)] if body else []
    rng.shuffle(headers)
    return b"\r\n".join([line, *headers, *more, b"", body])


def _chunked(rng: random.Random) -> bytes:
    lines = [_LINES[2], b"Host: localhost", b"Content-Type: application/json"]
    lines += [b"Authorization: Bearer k"] if rng.random() < 0.8 else []
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", b""])


def _headers(rng: random.Random) -> list[bytes]:
    found = []
    for _ in range(rng.choice((1, 1, 2, 5, 120))):
        value = rng.choice(_VALUES) if rng.random() < 0.8 else odd_text(rng).encode()
        found.append(rng.choice(_HEADERS) + rng.choice((b": ", b": ", b":", b" : ")) + value)
    return found


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes what one connection sends: a start, what is repeated, and what happens then."""
    target.mkdir()
    kind = rng.choice(_KINDS)
    again, pause = b"", 0.0
    if kind == "bytes":
        first = damage_bytes(b"".join(_request(rng) for _ in range(rng.choice((1, 1, 3)))), rng)
    elif kind == "headers":
        first = _request(rng, *_headers(rng))
    elif kind == "line":
        parts = [rng.choice(_METHODS), rng.choice(_TARGETS), rng.choice(_VERSIONS)]
        first = _request(rng, line=rng.choice((b" ", b" ", b"  ", b"\t")).join(parts))
    elif kind == "chunks":
        first = _chunked(rng) + b"".join(rng.choices(_CHUNKS, k=rng.choice((1, 2, 5))))
    elif kind == "noise":
        first = rng.randbytes(rng.choice((1, 20, 3000, 300_000)))
    elif kind == "ahead":
        first = b"".join(_request(rng) for _ in range(rng.choice((2, 5, 40, 3000))))
    elif kind == "endless":
        first, again = rng.choice(_ENDLESS)
        first = first.replace(b"CHUNKED", _chunked(rng))
    elif kind in ("half", "slowly"):
        whole = rng.choice((_request(rng), _request(rng, line=_LINES[2]), _chunked(rng)))
        first = whole[: rng.randrange(len(whole))]
        again, pause = (
            (rng.choice((b"a", b"\r\n", b"a: b\r\n")), 0.3) if kind == "slowly" else (b"", 0)
        )
    elif kind == "nothing":
        first = b""
    else:
        first, again, pause = b"", _request(rng, line=b"GET / HTTP/1.1"), 0.01
    then = rng.choice(("wait", "wait", "leave", "close", "shut"))
    script = {
        "kind": kind,
        "first": first.decode("latin-1"),
        "again": again.decode("latin-1"),
        "pause": pause,
        "then": "leave" if kind in ("slowly", "unread") else then,
    }
    (target / _SCRIPT).write_text(json.dumps(script))
    return f"{kind}, then {script['then']}: {first[:200]!r} and {again[:20]!r}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Sends it; the server answers or closes, and goes on."""
    server, before = _server()
    script = json.loads((folder / _SCRIPT).read_text())
    first, again = (script[name].encode("latin-1") for name in ("first", "again"))
    connection = server.connect()
    deadline = time.monotonic() + _SECONDS
    _send(connection, first, again, script["pause"], deadline)
    try:
        if script["then"] == "leave":
            _left_open.append((deadline, connection, f"{script['kind']} {first[:100]!r}"))
            return
        if script["then"] == "close":
            connection.close()
            return
        if script["then"] == "shut":
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        _judge(_received(connection, deadline))
        connection.close()
    finally:
        _check_left_open()
        _check(server, before)


def _send(
    connection: socket.socket, first: bytes, again: bytes, pause: float, deadline: float
) -> None:
    connection.settimeout(1)
    with suppress(OSError):
        connection.sendall(first)
        sent = 0
        # one that is fed slowly gets a few more bytes, and is left to the server's clock
        while again and sent < _MOST_SENT and time.monotonic() < deadline:
            if (sent and pause == 0.3) or (pause == 0.01 and sent > 20 * len(again)):
                return
            connection.sendall(again)
            sent += len(again)
            time.sleep(pause)


def _received(connection: socket.socket, deadline: float) -> bytes:
    """All that comes until the connection is closed.

    Raises:
        AssertionError: It is still open when the time is over.
    """
    received = b""
    with suppress(ConnectionError):
        while select.select([connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = connection.recv(65_536)
            if not chunk:
                return received
            received += chunk
        raise AssertionError(f"the connection is open after {_SECONDS:g} s: {received[:300]!r}")
    return received


def _judge(received: bytes) -> None:
    """Returns whether each answer is sound, or one of OpenAI's errors.

    Raises:
        Refusal: The last one refuses the request.
        AssertionError: One is neither.
    """
    if b"Traceback" in received or b"HTTP/1.1 500" in received:
        raise AssertionError(f"a failure: {received[:500]!r}")
    head, separator, body = received.rpartition(b"\r\n\r\n")
    *_, last = head.rpartition(b"HTTP/1.1 ")
    if not separator or not last[:3].isdigit() or last[:1] in (b"1", b"2", b"3"):
        return
    if last[:3] == b"400" and b"Disallowed CORS" in body:
        return
    if not body:
        # the answer to HEAD
        return
    error = json.loads(body)["error"]
    if error.keys() != {"message", "type", "param", "code"}:
        raise AssertionError(f"an error of another format: {body[:500]!r}")
    raise Refusal(error["message"])


def _check_left_open() -> None:
    """Those that were left open must have been closed in their time."""
    now = time.monotonic()
    while _left_open and _left_open[0][0] < now:
        _, connection, what = _left_open.popleft()
        with connection:
            connection.settimeout(1)
            try:
                while connection.recv(2**20):
                    pass
            except ConnectionError:
                continue
            except TimeoutError as error:
                raise AssertionError(f"left open for {_SECONDS:g} s: {what}") from error


def _check(server: Any, before: float) -> None:
    """The server answers somebody else soon, within its memory, and has logged no fault."""
    started = time.monotonic()
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = _received(connection, started + _SECONDS)
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise AssertionError(f"somebody else gets {answer[:200]!r}")
    if server.resident_mb - before > _MOST_MB:
        raise AssertionError(f"the server grew by {server.resident_mb - before:.0f} MB")
    if "Traceback" in server.log or server.process.poll() is not None:
        raise AssertionError(f"the server's log: {server.log[-1500:]}")


@cache
def _server() -> tuple[Any, float]:
    """A server that lives as long as this process, and its memory after a first request."""
    from tests.server.process import ServerProcess

    server = ServerProcess("--api-key", _KEY, "--max-body", "1MB", first=_LIMITS)
    with server.connect() as connection:
        connection.settimeout(60)
        connection.sendall(_request(random.Random(1), b"Connection: close", line=_LINES[2]))
        while connection.recv(65_536):
            pass
    return server, server.resident_mb


CLASS = FuzzClass(
    make_sources,
    mutate,
    exercise,
    refusals=(Refusal,),
    batch=100_000,
    count=20,
    packages=("starlette", "llguidance", "uvicorn", "httpx2"),
)
