"""Limits of what connections may send before anybody is known: little, soon, and not too often."""

import itertools
import json
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress

import httpx2
import pytest

from tests.server.process import ServerProcess

pytestmark = pytest.mark.serve

MOST = 40
_SMALL_LIMITS = f"""
from mlx_mmfree.server import run, service, settings
settings.HEAD_SECONDS = settings.UNREAD_SECONDS = run._KEEP_ALIVE_S = 1
service.BODY_SECONDS = 3
run.MOST_CONNECTIONS = {MOST}
"""
HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
_CHUNK = b"a" * 2**16


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(first=_SMALL_LIMITS) as server:
        yield server
        server.process.terminate()
        assert server.wait() == 0, server.log
        assert "Traceback" not in server.log, server.log


def answers(connection: socket.socket, data: bytes | Iterable[bytes]) -> bytes:
    """All that comes back until the connection is closed."""
    received = b""
    with suppress(ConnectionError):
        for part in [data] if isinstance(data, bytes) else data:
            connection.sendall(part)
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            received += part
    return received


def get(server: ServerProcess) -> bytes:
    """The status of the server, by a connection of its own."""
    with server.connect() as connection:
        return answers(connection, GET + b"Connection: close\r\n\r\n")[:12]


def endless(first: bytes, part: bytes = _CHUNK) -> Iterator[bytes]:
    return itertools.chain([first], itertools.repeat(part, 2000))


REFUSED: dict[str, tuple[bytes | Iterable[bytes], int]] = {
    "address without end": (endless(b"GET /"), 414),
    "long address": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    "header without end": (endless(GET + b"X: "), 431),
    "name of a header without end": (endless(GET), 431),
    "headers without end": (endless(GET, b"a: b\r\n" * 10_000), 431),
    "many headers": (GET + b"".join(b"a%d: b\r\n" % n for n in range(100)) + b"\r\n", 431),
    "large headers": (GET + b"".join(b"a: " + b"b" * 1000 + b"\r\n" for _ in range(80)), 431),
    "folded header without end": (endless(GET + b"X: a", b"\r\n b"), 400),
    "half a head": (GET, 408),
    "half a method": (b"G", 408),
    "empty lines": (b"\r\n" * 10, 408),
    "TLS": (bytes.fromhex("16030100a5010000a10303") + bytes(100), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 403),
    "zeros": (bytes(5000), 400),
    "version": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "method": (b"STEAL / HTTP/1.1\r\n\r\n", 400),
    "address that is none": (b"GET http://[ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "address of another": (b"GET http://evil.com/health HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "user in an address": (b"GET http://a@localhost/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "address that is no ASCII": ("GET /ä HTTP/1.1\r\n".encode() + HOST + b"\r\n", 400),
    "control character": (GET + b"X: a\x01b\r\n\r\n", 400),
    "space before the colon": (GET + b"X : a\r\n\r\n", 400),
    "two names": (GET + HOST + b"\r\n", 400),
    "two keys": (GET + b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n", 400),
    "two origins": (GET + b"Origin: http://localhost\r\nOrigin: http://localhost\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "length and chunks": (
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "compressed": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "chunked twice": (CHUNKED[:-2] + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "length below zero": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "length beyond all numbers": (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
    "large length": (POST + b"Content-Length: 9000000000\r\n\r\n{", 413),
    "size of a chunk": (CHUNKED + b"x\r\n", 400),
    "size beyond all numbers": (CHUNKED + b"f" * 30 + b"\r\n", 400),
    "extension without end": (endless(CHUNKED + b"2;x="), 431),
    "trailer without end": (endless(CHUNKED + b"2\r\n{}\r\n0\r\nX: "), 431),
    "trailers without end": (endless(CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 10_000), 431),
    "chunks without end": (endless(CHUNKED, b"10000\r\n" + _CHUNK + b"\r\n"), 413),
    "half a body": (POST + b"Content-Length: 20\r\n\r\n{", 408),
    "half a chunk": (CHUNKED + b"20\r\n{", 408),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_is_refused(server: ServerProcess, name: str) -> None:
    data, status = REFUSED[name]
    before = server.resident_mb
    with server.connect() as connection:
        started = time.monotonic()
        received = answers(connection, data)
        took = time.monotonic() - started
    assert server.resident_mb - before < 20
    assert took < 10
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), received[:500]
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and len(error["message"]) > 20


def test_an_address_may_name_the_server(server: ServerProcess) -> None:
    for path in (
        b"http://localhost/health",
        b"HTTP://LocalHost/health?a=b://c",
        b"/health?a=b://c",
    ):
        with server.connect() as connection:
            request = GET.replace(b"/health", path, 1) + b"Connection: close\r\n\r\n"
            assert answers(connection, request).startswith(b"HTTP/1.1 200 ")


def test_a_connection_that_sends_nothing_is_closed(server: ServerProcess) -> None:
    with server.connect() as connection:
        assert answers(connection, b"") == b""
    # also after an answer, and where only a line break comes then
    for more in (b"", b"\r\n"):
        with server.connect() as connection:
            connection.sendall(GET + b"\r\n")
            assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")
            assert answers(connection, more).partition(b" ")[2][:3] in (b"", b"408")


def test_idle_connections_make_space(server: ServerProcess) -> None:
    with ExitStack() as stack:
        for first in (b"", b"GET /", GET + b"\r\n", CHUNKED) * MOST:
            stack.enter_context(server.connect()).sendall(first)
            assert get(server) == b"HTTP/1.1 200"


def test_busy_connections_do_not(server: ServerProcess) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 30_000, "logit_bias": {"0": -100}}).encode()
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(MOST)]
        for connection in busy:
            connection.sendall(request)
        with pytest.raises(httpx2.HTTPStatusError) as refusal:
            for _ in range(100):
                httpx2.get(f"{server.url}/health").raise_for_status()
                time.sleep(0.02)
        response = refusal.value.response
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "too_many_connections"
    assert httpx2.get(f"{server.url}/health").status_code == 200


def test_slow_bodies_do_not_take_the_rows(server: ServerProcess) -> None:
    before = server.resident_mb
    large = POST + b"Content-Length: 7900000\r\n\r\n" + b" " * 1_000_000
    with ExitStack() as stack:
        for first in (large, CHUNKED) * (MOST // 2 - 1):
            connection = stack.enter_context(server.connect())
            connection.settimeout(1)
            with suppress(TimeoutError):
                connection.sendall(first)
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert server.resident_mb - before < 150


def test_many_requests_at_once(server: ServerProcess) -> None:
    with server.connect() as connection:
        received = answers(connection, (GET + b"\r\n") * 20_000)
    assert 1 <= received.count(b"HTTP/1.1 200 ") <= 17
    # a few are answered, as HTTP wants it
    with server.connect() as connection:
        connection.sendall((GET + b"\r\n") * 4 + b"GET / HTTP/9.9\r\n\r\n")
        received = answers(connection, b"")
    assert received.count(b"HTTP/1.1 200 ") == 4 and b" 400 " not in received


def test_what_follows_an_answer_does_not_go_on_for_ever(server: ServerProcess) -> None:
    chunk = b"1000\r\n" + bytes(4096) + b"\r\n"
    with server.connect() as connection:
        connection.sendall(GET + b"Transfer-Encoding: chunked\r\n\r\n")
        started = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - started < 20:
                connection.sendall(chunk)
                time.sleep(0.01)
        assert time.monotonic() - started < 10


def test_a_client_that_reads_nothing_is_left(server: ServerProcess) -> None:
    until = time.monotonic() + 60
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with suppress(ConnectionError):
            # more than the system's buffers hold
            while time.monotonic() < until:
                connection.sendall(b"GET /page/vendor/katex.min.js HTTP/1.1\r\n" + HOST + b"\r\n")
                time.sleep(0.02)
        received = answers(connection, b"")
    assert time.monotonic() < until
    assert b"HTTP/1.1 200 " in received


def test_an_upgrade_is_not_made(server: ServerProcess) -> None:
    for upgrade in (b"h2c", b"websocket"):
        with server.connect() as connection:
            asked = GET + b"Connection: Upgrade\r\nUpgrade: " + upgrade + b"\r\n\r\n"
            assert answers(connection, asked).startswith(b"HTTP/1.1 200 ")


def test_errors_have_the_format_of_their_address(server: ServerProcess) -> None:
    large = b"".join(b"a: " + b"b" * 1000 + b"\r\n" for _ in range(80))
    head = b"POST /v1/messages HTTP/1.1\r\n" + HOST
    for data, status in ((head + large, 431), (head + b"X : y\r\n\r\n", 400)):
        with server.connect() as connection:
            first, body = answers(connection, data).split(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 %d " % status)
        error = json.loads(body)
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
