"""Bodies that are checked in a process of their own, up to their first mistake."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from mlx_mmfree.server.bodies import tools
from mlx_mmfree.server.bodies.messages import MessagesRequest
from mlx_mmfree.server.bodies.reading import BodyReader
from mlx_mmfree.server.bodies.responses import ResponsesRequest
from mlx_mmfree.server.errors import RequestError
from mlx_mmfree.server.schemas import Body, ChatRequest, EmbeddingRequest, checked_body
from mlx_mmfree.server.settings import ServedModel, Settings

pytestmark = pytest.mark.serve

_ITEMS = [1] * 100_000


@pytest.fixture(scope="module")
def reader() -> Iterator[BodyReader]:
    reader = BodyReader(8_000_000)
    yield reader
    reader.close()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "a\né😀" * 30_000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a" * 100}] * 1000, "n": 2}),
        (EmbeddingRequest, {"input": [list(range(200))] * 1000}),
    ],
    ids=["text", "messages", "ids"],
)
def test_large_bodies_are_read_as_small_ones(
    reader: BodyReader, kind: type[Body], values: dict[str, Any]
) -> None:
    text = json.dumps(values).encode()
    assert reader.read(kind, text) == checked_body(kind, text, len(text))


@pytest.mark.parametrize(
    ("kind", "values", "param"),
    [
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "tool_calls": _ITEMS}]},
            "messages[0].tool_calls[0]",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "a", **{f"k{n}": 1 for n in _ITEMS}}]},
            "messages[0].k1",
        ),
        (ResponsesRequest, {"input": "a", "include": _ITEMS}, "include[0]"),
        (ResponsesRequest, {"input": [{"role": "user", "content": _ITEMS}]}, "input[0].content[0]"),
        (
            ResponsesRequest,
            {"input": "a", "metadata": {str(n): n for n in range(50_000)}},
            "metadata",
        ),
        (MessagesRequest, {"messages": [], "max_tokens": 1, "system": _ITEMS}, "messages"),
    ],
    ids=["calls", "unknown", "include", "content", "metadata", "system"],
)
def test_the_first_mistake_is_reported_and_no_error_is_built_for_the_others(
    reader: BodyReader, kind: type[Body], values: dict[str, Any], param: str
) -> None:
    text = json.dumps(values).encode()
    with pytest.raises(RequestError) as small:
        checked_body(kind, text, len(text))
    assert small.value.param == param
    if len(text) > 65_536:
        with pytest.raises(RequestError) as large:
            reader.read(kind, text)
        assert str(large.value) == str(small.value)
    # parsing alone: an error for each entry takes twenty times as long
    cause = small.value.__cause__
    assert cause is None or getattr(cause, "error_count", lambda: 1)() <= 2


def test_a_body_of_too_many_values_is_refused(reader: BodyReader) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": _ITEMS}}
    with pytest.raises(RequestError, match="at most 100,000 values") as refused:
        reader.read(ChatRequest, json.dumps(body).encode())
    assert refused.value.status == 413


def test_hints_are_left_after(reader: BodyReader) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "metadata": {"a": _ITEMS}}
    assert reader.read(ChatRequest, json.dumps(body).encode()).messages[0].content == "a"


def test_tools_that_are_left_out_are_named_in_the_log(
    reader: BodyReader, caplog: pytest.LogCaptureFixture
) -> None:
    offered = [{"type": "web_search"}, {"type": "custom", "name": "f"}]
    body = {"input": "a" * 70_000, "tools": offered}
    tools.left_out.cache_clear()
    with caplog.at_level("INFO", logger="mlx_mmfree.server"):
        read = reader.read(ResponsesRequest, json.dumps(body).encode())
    assert [tool.name for tool in read.tools] == ["f"]
    assert "tools of type 'web_search'" in caplog.text


@pytest.mark.parametrize("length", [1, 70_000], ids=["small", "large"])
def test_what_is_prepared_when_the_server_ends_is_reported_so(
    demo_model: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    from starlette.testclient import TestClient

    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service

    begun, goes_on = Event(), Event()

    def read(reader: BodyReader, kind: type[Body], text: bytes) -> Body:
        begun.set()
        assert goes_on.wait(60)
        return checked_body(kind, text, len(text))

    monkeypatch.setattr(BodyReader, "read", read)
    service = make_service([ServedModel("demo", *demo_model)], Settings())
    app = make_app(service)
    with TestClient(app, base_url="http://127.0.0.1") as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/v1/embeddings", json={"input": "a" * length})
        try:
            assert begun.wait(60) and client.portal is not None
            client.portal.call(service.begin_to_end)
            answer = asked.result(20)
        finally:
            goes_on.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_ending")
