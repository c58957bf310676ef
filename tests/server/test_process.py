"""The command `mmfree serve` in a process of its own: how it starts, is used, and ends."""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import UsageError
from mlx_mmfree.server.run import _listener
from tests.server.process import ServerProcess

pytestmark = pytest.mark.serve

ENDLESS = {"prompt": "Once", "max_tokens": 10**6, "logit_bias": {"0": -100}, "stream": True}

CAPACITY = ("--max-context", str(2 * 10**6))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--decode-concurrency", "2", "--max-waiting", "1", *CAPACITY) as server:
        yield server


def active(server: ServerProcess) -> int:
    number: int = httpx2.get(f"{server.url}/health").json()["active"]
    return number


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.02)
    raise AssertionError("It does not become so.")


def takes_no_connection(server: ServerProcess) -> bool:
    try:
        server.connect().close()
    except ConnectionError:
        return True
    return False


def wait_for(server: ServerProcess, number: int) -> None:
    """Waits until so many texts are under way."""
    wait_until(lambda: active(server) == number)


def events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """The objects of a stream, until its end is reported."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))


def test_it_says_where_and_what(server: ServerProcess) -> None:
    assert server.greeting == f"Serving demo at {server.url} (Ctrl-C ends it)\n"
    assert urlsplit(server.url).hostname == "127.0.0.1"
    assert httpx2.get(server.url).text.startswith("<!doctype html>")


def test_a_client_that_goes_away_frees_its_row(server: ServerProcess) -> None:
    wait_for(server, 0)
    for is_streamed in (True, False):
        body = ENDLESS | {"stream": is_streamed}
        with socket.create_connection(urlsplit(server.url).netloc.split(":")) as connection:
            content = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            head += f"application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            wait_for(server, 1)
        wait_for(server, 0)
    gone = 'mmfree_requests_total{path="/v1/completions",status="499"} 2.0'
    wait_until(lambda: gone in httpx2.get(f"{server.url}/metrics").text)


def test_a_body_without_end_is_refused_while_it_comes(server: ServerProcess) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    part = b"a" * 2**16
    chunk = f"{len(part):x}\r\n".encode() + part + b"\r\n"
    sent = 0
    with socket.create_connection(urlsplit(server.url).netloc.split(":"), timeout=60) as connection:
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        while not select.select([connection], [], [], 0)[0]:
            connection.sendall(chunk)
            sent += len(part)
            assert sent < 500 * 10**6
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_slot_of_the_queue_is_freed_too(server: ServerProcess) -> None:
    with (
        httpx2.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as first,
        httpx2.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as second,
    ):
        streams = events(first), events(second)
        assert all(next(stream)["object"] == "text_completion" for stream in streams)
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60
        ) as waiting:
            assert waiting.status_code == 200
            wait_for(server, 3)
            late = httpx2.post(f"{server.url}/v1/completions", json=ENDLESS)
            assert late.status_code == 429
        wait_for(server, 2)
    wait_for(server, 0)


def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    with ServerProcess("--session-dir", folder, "--grace", "60") as server:
        body = ENDLESS | {"max_tokens": 400, "prompt": "Once upon a time there was"}
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=60
        ) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            *_, last = stream
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0, server.log
        assert "Traceback" not in server.log, server.log
    # what was read and written is known to the next server
    with ServerProcess("--session-dir", folder) as server:
        sessions = httpx2.get(f"{server.url}/health").json()["sessions"]
        body = {"prompt": "Once upon a time there was a fox", "max_tokens": 1}
        usage = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
    assert sessions["states"] == 2
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_does_not_end_in_time_is_reported_so() -> None:
    with ServerProcess("--grace", "1", *CAPACITY) as server:
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60
        ) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGINT)
            *_, last = stream
        assert last["error"]["code"] == "server_ending"
        assert server.wait() == 0, server.log
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(first: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    with ServerProcess("--grace", "600", "--session-dir", folder, *CAPACITY) as server:
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60
        ) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(first)
            wait_until(lambda: takes_no_connection(server))
            assert "error" not in next(stream)
            server.process.send_signal(signal.SIGINT)
            *_, last = stream
        assert last["error"]["code"] == "server_ending"
        assert server.wait() == 0, server.log
        assert "Traceback" not in server.log and "terminate" not in server.log, server.log
    # what was read is kept all the same
    assert list(folder.iterdir())


def test_embeddings_that_do_not_end_in_time_are_reported_so() -> None:
    with ServerProcess("--grace", "1", "--prefill-step-size", "16", *CAPACITY) as server:
        body = {"input": [[5] * 250_000]}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx2.post, f"{server.url}/v1/embeddings", json=body, timeout=60)
            wait_for(server, 1)
            server.process.send_signal(signal.SIGTERM)
            answer = asked.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_ending"
        assert server.wait() == 0, server.log
        assert "Traceback" not in server.log, server.log


def test_clients_that_send_or_read_nothing_do_not_keep_it() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    content = json.dumps(ENDLESS | {"n": 2}).encode()
    with ServerProcess("--grace", "1", *CAPACITY) as server, ExitStack() as stack:
        for sent in (b"", head, head + b"Content-Length: 9\r\n\r\n{"):
            stack.enter_context(server.connect()).sendall(sent)
        connection = stack.enter_context(server.connect())
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        wait_for(server, 2)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        assert time.monotonic() - started < 10
        assert "Traceback" not in server.log, server.log


def test_a_key_that_is_no_utf8() -> None:
    key = b"\xff\xe4key"
    for flags, variables in (
        (["--api-key", os.fsdecode(key)], {}),
        ([], {"MLX_MMFREE_API_KEY": os.fsdecode(key)}),
    ):
        with ServerProcess(*flags, **variables) as server:
            for given, status in ((key, 200), (b"\xffkey", 401), ("ÿäkey".encode(), 401)):
                headers = {"Authorization": b"Bearer " + given}
                assert httpx2.get(f"{server.url}/v1/models", headers=headers).status_code == status


def test_the_key_may_come_from_the_environment() -> None:
    with ServerProcess("--allowed-hosts", "mac.home", MLX_MMFREE_API_KEY="secret") as server:
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret", "Host": "mac.home"}
        assert httpx2.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert "secret" not in server.greeting


def test_a_port_that_is_taken(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(urlsplit(server.url).port)
    assert main(["serve", "--port", port]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"listens at 127.0.0.1:{port};" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "--port"),
        (["--host", "\udcff"], "--host"),
        (["--api-key", " "], "--api-key"),
        (["--api-key", "a\nb"], "--api-key"),
        (["--adapter", "x"], "NAME=FOLDER"),
        (["--adapter", "a=x", "--adapter", "a=y"], "name of its own"),
        (["--adapter", "a=x", "--adapter-path", "y"], "--adapter-path"),
        (["--adapter", "a=nowhere"], "nowhere"),
        (["--session-memory", "0", "--session-dir", "x"], "--session-memory"),
        (["--prompt-cache-file", "nowhere"], "nowhere"),
        (["--extra-eos-token", "two words"], "--extra-eos-token"),
        (["--temp", "-1"], "--temp"),
    ],
)
def test_wrong_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("error:") == 1
    assert "Serving" not in captured.out


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    assert main(["serve"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err


def test_a_port_in_use_is_named_with_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"listens at 127\.0\.0\.1:{port}; --port \d+ is free"
        ):
            _listener("127.0.0.1", port)
