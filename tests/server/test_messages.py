"""Anthropic's interface: conversations, streams, tools, reasoning, limits and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.server import turns
from mlx_mmfree.server.bodies.messages import MessagesRequest
from mlx_mmfree.server.messages import VERSIONS
from mlx_mmfree.server.schemas import HINTS, in_lines
from tests.server.conftest import LOOK, Dictated, as_templates_read, with_template

pytestmark = pytest.mark.serve

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "What is a fox?"}]
ANSWER = "A fox is an animal."
TOOLS = [
    {
        "name": "look_up",
        "description": "Looks a word up.",
        "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
    }
]


def ask(dictated: Dictated, *texts: str, **body: Any) -> dict[str, Any]:
    response = dictated.post(PATH, *texts, **{"messages": USER, "max_tokens": 200} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def error_of(response: Any, status: int, kind: str) -> str:
    """The message of an error, whose format is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    message: str = body["error"]["message"]
    assert len(message) > 20 and "\n" not in message
    return message


def test_an_answer(dictated: Dictated) -> None:
    answer = ask(dictated, f"{ANSWER}<|eot_id|>")
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "m")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    count = dictated.post(COUNT, messages=USER).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    # what was read for the first answer is not read for the second
    again = ask(dictated, f"{ANSWER}<|eot_id|>")["usage"]
    assert again["cache_read_input_tokens"] > count - 8


def test_how_an_answer_ends(dictated: Dictated) -> None:
    cut = ask(dictated, ANSWER, max_tokens=3)
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 3
    stopped = ask(dictated, ANSWER, stop_sequences=["never", " is an"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " is an")
    assert stopped["content"] == [{"type": "text", "text": "A fox"}]


def test_an_answer_may_fill_the_context(
    start: Callable[..., Any], chat_model: Any, tmp_path: Path
) -> None:
    with start(max_context=64) as client:
        body = {"model": "chat", "messages": USER, "max_tokens": 32_000, "temperature": 0}
        answer = client.post(PATH, json=body).json()
        usage = answer["usage"]
        if answer["stop_reason"] != "end_turn":
            assert answer["stop_reason"] == "model_context_window_exceeded"
            total = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert total + usage["output_tokens"] == 64
        long = [{"role": "user", "content": "fox " * 200}]
        error_of(client.post(PATH, json=body | {"messages": long}), 413, "request_too_large")


def test_a_stream_is_the_same_answer(dictated: Dictated) -> None:
    text = f"Let me see.\n{LOOK}"
    body: dict[str, Any] = {"messages": USER, "max_tokens": 200, "tools": TOOLS}
    events = dictated.events(PATH, text, **body)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"written": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1 and "stopped" not in blocks[-1]
            delta = event["delta"]
            blocks[-1]["written"] += delta.get("text", delta.get("partial_json", ""))
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            blocks[-1]["stopped"] = True
    assert all(block["stopped"] for block in blocks)
    spoken, called = blocks
    whole = ask(dictated, text, tools=TOOLS)
    assert whole["content"][0] == {"type": "text", "text": spoken["written"]}
    assert whole["content"][1]["input"] == json.loads(called["written"]) == {"word": "fox"}
    assert called["input"] == {} and called["name"] == whole["content"][1]["name"] == "look_up"
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_results_of_tools_go_back(dictated: Dictated) -> None:
    first = ask(dictated, LOOK, tools=TOOLS)
    (call,) = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "an animal"}
    messages = [
        *USER,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    second = ask(dictated, f"{ANSWER}<|eot_id|>", tools=TOOLS, messages=messages)
    assert second["content"] == [{"type": "text", "text": ANSWER}]
    usage = first["usage"]
    known = sum(usage[name] for name in usage)
    # the whole first turn, but for its last tokens
    assert second["usage"]["cache_read_input_tokens"] >= known - 2


def test_the_last_effort_of_an_instruction_holds() -> None:
    later = {"role": "system", "content": "Go on.", "output_config": {"effort": "high"}}
    body = {
        "max_tokens": 5,
        "thinking": {"type": "adaptive", "display": "updates"},
        "output_config": {"effort": "low"},
        "messages": [*USER, later, later | {"output_config": {"effort": "medium"}}],
    }
    chat = MessagesRequest.model_validate(body).as_chat()
    assert chat.chat_template_kwargs == {"reasoning_effort": "medium"}
    body["messages"] = [USER[0] | {"output_config": {"effort": "high"}}]
    with pytest.raises(ValueError, match="only where its role is 'system'"):
        MessagesRequest.model_validate(body)


def test_the_turns_that_a_template_gets() -> None:
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 5,
            "system": [
                {"type": "text", "text": "Be", "cache_control": {}},
                {"type": "text", "text": "brief."},
            ],
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "output_config": {"effort": "low"},
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "tools": TOOLS,
            "messages": [
                *USER,
                {"role": "system", "content": "Now be long."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "redacted_thinking", "data": "?"},
                        {"type": "text", "text": "I look."},
                        {
                            "type": "tool_use",
                            "id": "t",
                            "name": "look_up",
                            "input": {"word": "fox"},
                        },
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "text", "text": "red"}],
                            "is_error": False,
                        }
                    ],
                },
            ],
        }
    )
    chat = body.as_chat()
    turns = as_templates_read(chat.messages)
    function = {"name": "look_up", "arguments": {"word": "fox"}}
    assert turns == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "What is a fox?"},
        {"role": "system", "content": "Now be long."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t", "name": "look_up", "content": "red"},
    ]
    assert chat.tool_choice == "required" and not chat.parallel_tool_calls
    assert chat.chat_template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert [tool.function.name for tool in chat.tools] == ["look_up"]
    assert chat.max_tokens == 5


def test_a_schema_and_a_forced_call(start: Callable[..., Any], dictated: Dictated) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "hen"]}}}
    schema |= {"required": ["kind"], "additionalProperties": False}
    body = {"model": "chat", "messages": USER, "max_tokens": 100}
    with start() as client:
        format = {"format": {"type": "json_schema", "schema": schema}}
        answer = client.post(PATH, json=body | {"output_config": format}).json()
        assert json.loads(answer["content"][0]["text"])["kind"] in ("fox", "hen")
        error = client.post(PATH, json=body | {"output_config": format, "tools": TOOLS})
        assert "'tools'" in error_of(error, 400, "invalid_request_error")
    forced = LOOK.replace("<tool_call>", "<tool_call>\n").replace("</", "\n</")
    called = ask(dictated, forced, tools=TOOLS, tool_choice={"type": "tool", "name": "look_up"})
    assert called["stop_reason"] == "tool_use"


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.com/x.png"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": None}, "'max_tokens' must be given"),
        ({"max_tokens": 0}, "'max_tokens'"),
        ({"max_token": 5}, "Did you mean 'max_tokens'?"),
        ({"stop": ["a"]}, "'stop' must be left out"),
        ({"n": 2}, "'n' must be left out"),
        ({"messages": []}, "'messages' must have at least 1 item"),
        ({"messages": [{"role": "user", "content": []}]}, "'messages' must have at least 1 item"),
        ({"messages": [*USER, {"role": "assistant", "content": "A fox"}]}, "a turn of the user"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "read no pictures"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "a type of text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must have 'text'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "'x'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
            "'user'",
        ),
        ({"system": [IMAGE]}, "read no pictures"),
        ({"system": 5}, "'system'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "'tool_choice'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "'tool_choice' must have a 'name'"),
        ({"tools": [{**TOOLS[0], "strict": "yes"}]}, "'tools[0].strict' must be"),
        ({"stop_sequences": [""]}, "'stop_sequences'"),
        ({"temperature": 1.5}, "'temperature'"),
        ({"mcp_servers": [{}]}, "does not support 'mcp_servers'"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "'thinking.budget'"),
    ],
)
def test_what_is_refused(dictated: Dictated, changes: dict[str, Any], words: str) -> None:
    body = {"messages": USER, "max_tokens": 5} | changes
    error = error_of(dictated.post(PATH, **body), 400, "invalid_request_error")
    assert words in error


def test_conversations_on_the_server_are_refused_as_clients_know_it(dictated: Dictated) -> None:
    body = {"messages": USER, "max_tokens": 5, "thread": {"type": "create"}}
    error = dictated.post(PATH, **body).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "does not support 'thread'" in error["message"]


def test_thousands_of_blocks_are_concatenated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Text(str):
        def __radd__(self, other: str) -> str:
            raise AssertionError("all texts before this one are copied")

    joins: list[int] = []

    def counted(texts: list[str]) -> str:
        joins.append(len(texts))
        return in_lines(texts)

    monkeypatch.setattr(turns, "in_lines", counted)
    found = turns.Turns().at("messages[0]")
    for add in (found.instruct, found.ask, found.think, found.say):
        for text in ("", "a", "b\n", "c"):
            add(Text(text))
    assert found.messages == [
        {"role": "system", "content": "a\nb\nc"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "ab\nc", "reasoning_content": "ab\nc"},
    ]
    assert joins == [4, 4]


def test_hints_of_agents_are_taken(dictated: Dictated) -> None:
    names = ("context_management", "metadata", "service_tier", "cache_control", "speed")
    assert set(names) < MessagesRequest.hints and MessagesRequest.hints > HINTS
    ask(dictated, ANSWER, max_tokens=1, **{name: {"a": 1} for name in names})


def test_headers_and_errors_have_the_format(start: Callable[..., Any]) -> None:
    body = {"model": "chat", "messages": USER, "max_tokens": 1}
    with start(api_key="k") as client:

        def post(path: str = PATH, **headers: str) -> Any:
            return client.post(path, json=body, headers=headers)

        assert post(**{"x-api-key": "k"}).status_code == 200
        assert post(Authorization="Bearer k").status_code == 200
        assert post("/v1/chat/completions", **{"x-api-key": "k"}).status_code == 200
        error_of(post(**{"x-api-key": "l"}), 401, "authentication_error")
        error_of(post(), 401, "authentication_error")
        assert post("/v1/chat/completions").json()["error"]["code"] == "invalid_api_key"
        good = {"x-api-key": "k"}
        for version in VERSIONS:
            assert post(**good, **{"anthropic-version": version}).status_code == 200
        old = post(**good, **{"anthropic-version": "2023-01-01"})
        assert "2023-06-01" in error_of(old, 400, "invalid_request_error")
        foreign = post(**good, Origin="https://evil.example")
        error_of(foreign, 403, "permission_error")
        error_of(post(**good, Host="evil.example"), 403, "permission_error")
        error_of(client.get(PATH, headers=good), 405, "invalid_request_error")
        error_of(post(f"{PATH}/batches", **good), 404, "not_found_error")
        missing = client.post(PATH, json=body | {"model": "x"}, headers=good)
        error_of(missing, 404, "not_found_error")
    with start(max_body_bytes=100) as client:
        large = client.post(PATH, json=body | {"system": "a" * 100})
        error_of(large, 413, "request_too_large")


def test_a_template_without_tools_refuses_them(start: Callable[..., Any], tmp_path: Path) -> None:
    from mlx_mmfree.server.settings import ServedModel

    served = ServedModel("t", *with_template(tmp_path / "t", "{{ messages[0].content }}"))
    with start(served) as client:
        body = {"model": "t", "messages": USER, "max_tokens": 5, "tools": TOOLS}
        for path in (PATH, COUNT):
            error = client.post(
                path, json={k: v for k, v in body.items() if path == PATH or k != "max_tokens"}
            )
            assert "'tools'" in error_of(error, 400, "invalid_request_error")


def test_a_failure_is_reported_in_the_stream(
    dictated: Dictated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_mmfree.generation.scheduling import Scheduler

    def breaks(scheduler: Scheduler) -> Any:
        raise RuntimeError("a secret path")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", breaks)
        events = dictated.events(PATH, ANSWER, messages=USER, max_tokens=5)
    assert [event["type"] for event in events] == ["message_start", "ping", "error"]
    assert events[-1]["error"]["type"] == "api_error"
    assert "secret" not in events[-1]["error"]["message"]
    ask(dictated, ANSWER, max_tokens=1)
