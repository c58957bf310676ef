"""Who may call the server, what it tells of itself, and how much it takes on."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.test_refusals import COMPLETIONS, error_of

pytestmark = pytest.mark.serve

BODY = {"prompt": "a", "max_tokens": 1}
OTHER = "http://other.example"


def test_a_key_is_asked_for(start: Callable[..., Any]) -> None:
    with start(api_key="ärger") as client:
        for headers in (
            {},
            {"Authorization": "Bearer no"},
            {"Authorization": "Basic ärger".encode()},
        ):
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                error = error_of(client.get(path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
            error_of(client.post(COMPLETIONS, json=BODY, headers=headers), 401)
        right = {"Authorization": "Bearer ärger".encode()}
        assert client.post(COMPLETIONS, json=BODY, headers=right).status_code == 200
        # the page asks for the key itself
        assert client.get("/").status_code == client.get("/health").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example"])
def test_a_strange_name_is_refused(client: Any, host: str) -> None:
    for path in ("/", "/health", "/v1/models"):
        error = error_of(client.get(path, headers={"Host": host}), 403)
        assert error["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host",
    [
        *("", "[", "[::1", "]:1", "[::1]x", "[127.0.0.1]", "127.0.0.1:", "127.0.0.1:99999"),
        *("evil.example@127.0.0.1", "127.0.0.1/x", "127.0.0.1?x", "127.0.0.1#x", "127.0.0.1 x"),
    ],
)
def test_what_is_no_name_and_port_is_refused(client: Any, host: str) -> None:
    for path in ("/", "/health", "/v1/models"):
        error_of(client.get(path, headers={"Host": host}), 400)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080", 200),
        ("localhost", "https://localhost:443", 200),
        ("[::1]:1", "http://[::1]:1", 200),
        ("127.0.0.1:8080", "http://127.0.0.1", 403),
        ("127.0.0.1:8080", "ftp://127.0.0.1:8080", 403),
        ("127.0.0.1:8080", "http://a@127.0.0.1:8080", 403),
        ("127.0.0.1:8080", "127.0.0.1:8080", 403),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/", 403),
        ("localhost", "http://127.0.0.1", 403),
    ],
)
def test_an_origin_is_this_host_and_port(client: Any, host: str, origin: str, status: int) -> None:
    headers = {"Host": host, "Origin": origin}
    assert client.get("/health", headers=headers).status_code == status


def test_names_of_the_server(start: Callable[..., Any]) -> None:
    with start(hosts=frozenset({"Mac.home"})) as client:
        for host in (
            "localhost",
            "LOCALHOST:1",
            "127.0.0.1:80",
            "[::1]:80",
            "10.0.0.7",
            "mac.home",
        ):
            assert client.get("/health", headers={"Host": host}).status_code == 200, host


def test_other_pages_are_refused(client: Any) -> None:
    no_addresses = (
        "http://[",
        "http://[::1",
        "http://]",
        "http://[a]:b",
        "//[",
        "ftp:[::1]]",
        "\xe4",
        "",
    )
    for origin in (OTHER, "null", "http://127.0.0.1:9999", *no_addresses):
        headers = {"Origin": origin.encode("latin-1")}
        error = error_of(client.post(COMPLETIONS, json=BODY, headers=headers), 403)
        assert error["code"] == "origin_not_allowed"
    own = client.post(COMPLETIONS, json=BODY, headers={"Origin": "http://127.0.0.1:8080"})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
    asked = {"Origin": OTHER, "Access-Control-Request-Method": "POST"}
    assert client.options(COMPLETIONS, headers=asked).status_code == 400


def test_pages_that_are_allowed(start: Callable[..., Any]) -> None:
    asked = {
        "Origin": OTHER,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for origins in ((OTHER,), ("*",)):
        with start(origins=origins, api_key="k") as client:
            # a browser asks without the key
            answer = client.options(COMPLETIONS, headers=asked)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in (OTHER, "*")
            headers = {"Origin": OTHER, "Authorization": "Bearer k"}
            answer = client.post(COMPLETIONS, json=BODY, headers=headers)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in (OTHER, "*")
    with start(origins=(OTHER,)) as client:
        error_of(client.get("/health", headers={"Origin": "http://third.example"}), 403)


def test_more_texts_than_there_is_capacity_for(start: Callable[..., Any]) -> None:
    with start(max_rows=1, max_waiting=2) as client:
        response = client.post(COMPLETIONS, json=BODY | {"n": 4})
        error = error_of(response, 429)
        assert error["type"] == "rate_limit_error" and response.headers["retry-after"] == "1"
        assert client.post(COMPLETIONS, json=BODY | {"n": 3}).status_code == 200


def test_a_request_that_takes_too_long(start: Callable[..., Any]) -> None:
    with start(timeout_s=0.0, max_context=10**6) as client:
        body = {"prompt": "a", "max_tokens": 10**5, "logit_bias": {"0": -100}}
        error = error_of(client.post(COMPLETIONS, json=body), 504)
        assert error["code"] == "timeout"
        streamed = client.post(COMPLETIONS, json=body | {"stream": True})
        assert '"code":"timeout"' in streamed.text and "[DONE]" not in streamed.text
        assert client.get("/health").json()["active"] == 0


def test_the_page_and_what_is_offered(client: Any) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<script " in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("page.js", "vendor/purify.es.mjs"):
        script = client.get(f"/page/{name}")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    for name in (
        "",
        "page.py",
        "vendor",
        "%2e%2e/page.py",
        "..%2fpage.py",
        "vendor/LICENSE-DOMPurify",
    ):
        assert client.get(f"/page/{name}").status_code == 404
    offered = client.get("/v1/models").json()
    assert [model["id"] for model in offered["data"]] == ["demo", "chat"]
    assert [model["chat_template"] for model in offered["data"]] == [False, True]
    assert [model["kind"] for model in offered["data"]] == ["base", "chat"]
    assert all(model["loaded"] for model in offered["data"])
    assert {model["context_length"] for model in offered["data"]} == {32_768}
    assert client.get("/v1/models/chat").json() == offered["data"][1]


def test_numbers_for_prometheus(start: Callable[..., Any]) -> None:
    with start() as client:
        client.post(COMPLETIONS, json={"prompt": "Once upon a time", "max_tokens": 5, "n": 2})
        client.get("/one/of/many/addresses")
        # what a text leaves is kept after its answer
        before, states = None, client.get("/health").json()["sessions"]
        while before != states:
            before, answer = states, client.get("/metrics")
            states = client.get("/health").json()["sessions"]
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")
    assert lines['mmfree_requests_total{path="/v1/completions",status="200"}'] == "1.0"
    assert lines['mmfree_requests_total{path="other",status="404"}'] == "1.0"
    assert 2 <= float(lines["mmfree_generated_tokens_total"]) <= 10
    assert lines["mmfree_first_token_seconds_count"] == "1.0"
    assert lines["mmfree_active_texts"] == "0.0"
    assert float(lines["mmfree_sessions"]) == states["states"] > 0
    assert float(lines["mmfree_session_memory_bytes"]) == states["bytes"] > 0
    assert float(lines["mmfree_session_disk_bytes"]) == states["disk_bytes"] == 0
    # the two answers share what is read, but nobody has asked for it before
    assert lines["mmfree_session_misses_total"] == "2.0"
    assert lines["mmfree_session_tokens_saved_total"] == "0.0"


def test_the_log_holds_no_word_of_a_prompt(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="mlx_mmfree.server"):
        body = {"prompt": "unbelievable secret", "max_tokens": 2, "user": "me\n", "seed": 1}
        client.post(COMPLETIONS, json=body)
        client.post(COMPLETIONS, json={"prompt": "unbelievable secret", "x": 1})
        client.get("/a%0Ab%1B[2J")
    assert len(caplog.messages) == 3
    assert "secret" not in caplog.text
    assert "POST /v1/completions 200, user 'me\\n', demo, " in caplog.messages[0]
    assert "POST /v1/completions 400" in caplog.messages[1]
    assert not any(character in line for line in caplog.messages for character in "\n\x1b")
