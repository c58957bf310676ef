"""Requests that are refused, in OpenAI's format, by the name of what is wrong."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlx_mmfree.models import Decoder
from mlx_mmfree.server.schemas import HINTS, ChatRequest, CompletionRequest, log_hint
from mlx_mmfree.tokenizer.tokenizer_json import JsonVocabulary

pytestmark = pytest.mark.serve

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "Hi"}]


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error in an answer, whose format is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (content,) = response.json().values()
    assert content.keys() == {"message", "type", "param", "code"}
    assert len(content["message"]) > 20 and "\n" not in content["message"]
    assert "Traceback" not in content["message"] and "site-packages" not in content["message"]
    return dict(content)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 20.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 128, "prompt": ["a", "b"]}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": {"1": 5, "01": -5}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"user": 7}, "user"),
        # known elsewhere, not here
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"echo": 0}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"store": True}, "store"),
        # known nowhere
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"adapter_path": "/etc"}, "adapter_path"),
        ({"temprature": 1}, "temprature"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_a_wrong_parameter_is_named(client: Any, changes: dict[str, Any], param: str) -> None:
    body = {"prompt": "a"} | changes
    error = error_of(client.post(COMPLETIONS, json=body), 400)
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "template": "y"}]}, "messages[0].template"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content"),
        ({"messages": [{**MESSAGES[0], "tool_calls": []}, 5]}, "messages[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"description": "a" * 10**6}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logprobs": 1}, "logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"reasoning_budget": -1}, "reasoning_budget"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_a_wrong_parameter_of_a_chat_is_named(
    client: Any, changes: dict[str, Any], param: str
) -> None:
    body = {"messages": MESSAGES, "model": "chat"} | changes
    error = error_of(client.post(CHAT, json=body), 400)
    assert error["param"] == param


def test_what_asks_for_nothing_is_taken(client: Any) -> None:
    nothing = {name: None for name in CompletionRequest.neutral}
    same = {"echo": False, "best_of": 1, "suffix": "", "store": False}
    for more in (nothing, same):
        body = {"prompt": "a", "max_tokens": 1, **more}
        assert client.post(COMPLETIONS, json=body).status_code == 200
    body = {"messages": MESSAGES, "model": "chat", "max_tokens": 1}
    more = {"parallel_tool_calls": True, "modalities": ["text"], "tools": []}
    nothing = {name: None for name in ChatRequest.neutral}
    for each in (more, nothing):
        assert client.post(CHAT, json=body | each).status_code == 200


def test_numbers_come_in_every_way_that_clients_write_them(client: Any) -> None:
    same = [
        (COMPLETIONS, {"prompt": [5.0, 6.0], "max_tokens": 2.0, "n": 1.0, "best_of": 1.0}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "top_k": -1, "seed": 3.0, "logprobs": 0.0}),
        (CHAT, {"messages": MESSAGES, "max_tokens": -1, "max_completion_tokens": 2}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": -1.0}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2, "top_logprobs": 0, "functions": []}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2.0, "top_k": -1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2.0, "store": False}),
    ]
    for path, body in same:
        model = {} if path == COMPLETIONS else {"model": "chat"}
        answer = client.post(path, json=model | body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) <= 2
    without = client.post("/v1/responses", json={"model": "chat", "input": "a"} | NO_LIMIT)
    assert without.status_code == 200 and without.json()["max_output_tokens"] is None


NO_LIMIT = {"max_output_tokens": -1, "store": False, "top_p": 0}


def test_no_part_of_the_distribution_is_the_likeliest_token(client: Any) -> None:
    texts = {
        client.post(COMPLETIONS, json={"prompt": "The fox", "max_tokens": 8, **chosen}).json()[
            "choices"
        ][0]["text"]
        for chosen in ({"top_p": 0}, {"top_p": 0.0, "temperature": 2}, {"temperature": 0})
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("changes", "bounds"),
    [
        ({"temperature": 3}, "a number from 0 to 2"),
        ({"top_k": 20.5}, "a whole number from 0 to 1,000,000"),
        ({"max_tokens": -2}, "a whole number of at least 1"),
        ({"repetition_penalty": 0}, "a number above 0 and at most 10"),
        ({"logit_bias": {"5": 101}}, "a number from -100 to 100"),
    ],
)
def test_a_number_outside_its_range_is_refused_with_the_range(
    client: Any, changes: dict[str, Any], bounds: str
) -> None:
    error = error_of(client.post(COMPLETIONS, json={"prompt": "a"} | changes), 400)
    assert f"must be {bounds} but got" in error["message"]


def test_hints_are_taken_and_named_once(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    hints = {
        "metadata": {"task": "a secret"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": 5,
        "service_tier": "flex",
    }
    assert hints.keys() == HINTS
    log_hint.cache_clear()
    with caplog.at_level("INFO", logger="mlx_mmfree.server.schemas"):
        for path, body in (
            (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
            (CHAT, {"messages": MESSAGES, "model": "chat", "max_tokens": 1}),
            (EMBEDDINGS, {"input": "a"}),
        ):
            assert client.post(path, json=body | hints | {"user": "me"}).status_code == 200
    lines = [line for name, _, line in caplog.record_tuples if name == "mlx_mmfree.server.schemas"]
    assert len(lines) == len(hints)
    assert all(f"'{name}'" in line for name, line in zip(hints, lines, strict=True))
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        (COMPLETIONS, "max_token", "max_tokens"),
        (COMPLETIONS, "temprature", "temperature"),
        (CHAT, "max_completions_tokens", "max_completion_tokens"),
        (CHAT, "toolchoice", "tool_choice"),
        (EMBEDDINGS, "dimension", "dimensions"),
        (CHAT, "meta_data", "metadata"),
        (COMPLETIONS, "adapter_path", None),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_likely_one(
    client: Any, path: str, name: str, meant: str | None
) -> None:
    body = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": MESSAGES}, EMBEDDINGS: {"input": "a"}}
    error = error_of(client.post(path, json=body[path] | {name: 5}), 400)
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert error["message"].endswith(f" Did you mean '{meant}'?") == (meant is not None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"prompt"',
        b"\xff\xfe",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"}",
        b'{"prompt": "a", "user": ' + b"[" * 70 + b"]" * 70 + b"}",
    ],
)
def test_a_body_that_is_no_sound_json(client: Any, text: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error_of(client.post(COMPLETIONS, content=text, headers=headers), 400)


def test_an_unknown_model(client: Any) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        error = error_of(client.post(path, json=body | {"model": "../x"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'demo', 'chat'" in error["message"]
    error_of(client.get("/v1/models/nothing/at/all"), 404)


def test_addresses_and_methods(client: Any) -> None:
    error = error_of(client.get("/v1/nothing"), 404)
    assert "no address '/v1/nothing'. It has /, /page/{name:path}, /health, " in error["message"]
    error_of(client.get("/../../etc/passwd"), 404)
    error = error_of(client.get(COMPLETIONS), 405)
    assert f"'{COMPLETIONS}' takes the method POST but got GET." in error["message"]
    error = error_of(client.post(COMPLETIONS, data={"prompt": "a"}), 415)
    assert (
        "must be application/json or left out but is 'application/x-www-form-urlencoded'"
        in error["message"]
    )


def test_a_body_whose_type_is_not_named_is_read_as_json(client: Any) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    request = client.build_request("POST", COMPLETIONS, content=body)
    assert "content-type" not in request.headers
    assert client.send(request).status_code == 200
    error_of(client.post(COMPLETIONS, content=b"prompt=a"), 400)
    # what a browser sends for another page without asking first
    error_of(client.post(COMPLETIONS, content=body, headers={"Content-Type": "text/plain"}), 415)
    error_of(
        client.post(COMPLETIONS, content=body, headers={"Origin": "https://evil.example"}), 403
    )


def test_embeddings_that_are_refused(client: Any) -> None:
    for changes, param in (
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"encoding_format": "png"}, "encoding_format"),
        ({"dimensions": 5}, "dimensions"),
        ({"dims": 5}, "dims"),
    ):
        error = error_of(client.post(EMBEDDINGS, json={"input": "a"} | changes), 400)
        assert error["param"] == param
    error = error_of(client.post(EMBEDDINGS, json={"input": ["a"] * 2_049}), 413)
    assert "at most 2,048 texts but holds 2,049" in error["message"]
    error = error_of(client.post(EMBEDDINGS, json={"input": "the " * 40_000}), 413)
    assert "a text of 'input' must have at most 32,768 tokens" in error["message"]
    error = error_of(client.post(EMBEDDINGS, json={"input": 17 * [30_000 * [5]]}), 413)
    assert "'input' must have at most 450,000 tokens but has 510,000" in error["message"]


def test_as_many_texts_are_embedded_as_openai_takes(client: Any) -> None:
    data = client.post(EMBEDDINGS, json={"input": 2_048 * [[5]]}).json()["data"]
    assert len(data) == 2_048 and data[0]["embedding"] == data[-1]["embedding"]


def test_embeddings_longer_than_the_model_was_made_for(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "context_length", 6)
    with start() as client:
        body = {"input": [[5, 5, 5], 7 * [5]]}
        error = error_of(client.post(EMBEDDINGS, json=body), 413)
        assert error["code"] == "context_length_exceeded"
        assert (
            "at most 6 tokens, as many as the model was made for, but one has 7"
            in (error["message"])
        )
        body = {"input": [[5, 5, 5], 6 * [5]]}
        assert client.post(EMBEDDINGS, json=body).status_code == 200


def test_limits_of_size(start: Callable[..., Any]) -> None:
    with start(max_body_bytes=300, max_context=40, max_tokens=8) as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": "a" * 400}), 413)
        assert "300 bytes" in error["message"]

        def in_chunks() -> Any:
            yield b'{"prompt": "'
            yield from 100 * [b"a" * 10]

        headers = {"Content-Type": "application/json"}
        error_of(client.post(COMPLETIONS, content=in_chunks(), headers=headers), 413)
        error = error_of(client.post(COMPLETIONS, json={"prompt": 25 * [5], "max_tokens": 16}), 413)
        assert error["code"] == "context_length_exceeded"
        error_of(client.post(COMPLETIONS, json={"prompt": 40 * [5]}), 413)
        # an answer without a number of its own gets what is left
        usage = client.post(COMPLETIONS, json={"prompt": 38 * [5], "temperature": 0}).json()[
            "usage"
        ]
        assert usage["completion_tokens"] <= 2
        usage = client.post(COMPLETIONS, json={"prompt": [5], "logit_bias": {"0": -100}}).json()
        assert usage["usage"]["completion_tokens"] == 8


def test_what_has_too_many_tokens_is_not_encoded(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*values: object, **more: object) -> None:
        raise AssertionError("It is encoded.")

    large = "once upon a time " * 400_000
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": large}]
    with start() as client:
        # what is fast is left out, so that nothing else can refuse it
        monkeypatch.setattr(JsonVocabulary, "encode", encode)
        for path, body in (
            (COMPLETIONS, {"prompt": large}),
            (COMPLETIONS, {"prompt": [large, "a"], "n": 2}),
            (COMPLETIONS, {"prompt": [5] * 40_000}),
            (EMBEDDINGS, {"input": large}),
            (CHAT, {"model": "chat", "messages": messages}),
            (CHAT, {"model": "chat", "messages": [{"role": "user", "content": "c" * 700}] * 9000}),
        ):
            error = error_of(client.post(path, json=body), 413)
            assert error["code"] == "context_length_exceeded"
            assert "at most 32,768 tokens but has " in error["message"]
        error = error_of(client.post(EMBEDDINGS, json={"input": [large[:60_000]] * 130}), 413)
        assert "'input' must have at most 450,000 tokens but has at least" in error["message"]
        error = error_of(client.post(COMPLETIONS, json={"prompt": ["a"] * 50_000}), 400)
        assert error["param"] == "n"


def test_a_failure_of_one_request_is_its_own(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_mmfree.generation import sampling

    class Broken(sampling.LogitBias):
        def __call__(self, logits: Any, state: Any) -> Any:
            raise ZeroDivisionError("a secret of the server")

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "LogitBias", Broken)
        body = {"prompt": "a", "max_tokens": 4, "logit_bias": {"1": 1}}
        error = error_of(client.post(COMPLETIONS, json=body), 500)
        assert "secret" not in error["message"]
        streamed = client.post(COMPLETIONS, json=body | {"stream": True})
        assert streamed.status_code == 200
        *_, last = [line for line in streamed.text.split("\n\n") if line]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert client.post(COMPLETIONS, json=body).status_code == 200


def test_a_failure_of_the_model_does_not_end_the_server(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_mmfree.generation.scheduling import Scheduler

    broken: list[Scheduler] = []
    step = Scheduler.step

    def breaks(scheduler: Scheduler) -> Any:
        """The first scheduler fails, and goes on to fail."""
        if not broken:
            broken.append(scheduler)
        if scheduler is broken[0]:
            raise RuntimeError("[metal] out of memory at a secret path")
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", breaks)
    error = error_of(client.post(COMPLETIONS, json={"prompt": "a", "n": 3}), 500)
    assert "secret" not in error["message"]
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert client.get("/health").json()["active"] == 0
