"""OpenAI's interface of responses: items, streams, tools, and conversations that are kept."""

import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.server import stored_responses
from mlx_mmfree.server.bodies.responses import ResponsesRequest
from mlx_mmfree.server.responses import ResponsesAnswer
from mlx_mmfree.server.settings import Settings
from mlx_mmfree.server.stored_responses import StoredResponses, new_name
from tests.server.conftest import LOOK, Dictated, as_templates_read
from tests.server.test_refusals import error_of

pytestmark = pytest.mark.serve

PATH = "/v1/responses"
ASKED = "What is a fox?"
ANSWER = "A fox is an animal."
END = "<|eot_id|>"
TOOLS = [
    {
        "type": "function",
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        "strict": False,
    }
]


def ask(dictated: Dictated, *texts: str, **body: Any) -> dict[str, Any]:
    response = dictated.post(PATH, *texts, **{"input": ASKED} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_response(dictated: Dictated) -> None:
    answer = ask(dictated, ANSWER + END, instructions="Be brief.", metadata={"a": "b"})
    (message,) = answer["output"]
    (part,) = message["content"]
    assert part == {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "completed",
    )
    assert re.fullmatch(r"resp_[0-9a-f]{48}", answer["id"])
    assert answer["status"] == "completed" and answer["error"] is None
    assert answer["metadata"] == {"a": "b"} and answer["instructions"] == "Be brief."
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    cut = ask(dictated, ANSWER, max_output_tokens=2)
    assert cut["status"] == "incomplete" and cut["usage"]["output_tokens"] == 2
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_stream_is_the_same_response(dictated: Dictated) -> None:
    body: dict[str, Any] = {"input": ASKED, "tools": TOOLS}
    events = dictated.events(PATH, f"Let me see.\n{LOOK}", **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    distinct = [kind for n, kind in enumerate(kinds) if not n or kind != kinds[n - 1]]
    assert distinct == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    response = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done
    spoken, called = done
    written = [
        "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
        for kind in ("output_text", "function_call_arguments")
    ]
    assert written == [spoken["content"][0]["text"], called["arguments"]]
    assert (called["name"], json.loads(called["arguments"])) == ("look_up", {"word": "fox"})
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {spoken["id"], called["id"]}
    whole = ask(dictated, f"Let me see.\n{LOOK}", tools=TOOLS)
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    assert whole.keys() == response.keys()


def test_a_conversation_goes_on_by_its_name(dictated: Dictated) -> None:
    first = ask(dictated, LOOK, tools=TOOLS)
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "an animal"}
    body: dict[str, Any] = {"tools": TOOLS, "input": [result]}
    second = ask(dictated, ANSWER + END, previous_response_id=first["id"], **body)
    assert second["previous_response_id"] == first["id"]
    assert second["output"][0]["content"][0]["text"] == ANSWER
    # what the model has read and written is cached
    known = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert known >= first["usage"]["total_tokens"] - 2
    # the same conversation, sent as a whole
    items = [{"role": "user", "content": ASKED}, call, result]
    whole = ask(dictated, ANSWER + END, tools=TOOLS, input=items, store=False)
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    third = ask(dictated, ANSWER + END, previous_response_id=second["id"], input="And a hen?")
    assert third["usage"]["input_tokens"] > 0


def test_a_conversation_goes_on_from_an_answer_that_was_cut(dictated: Dictated) -> None:
    for count in (3, 20, 40):
        first = ask(dictated, LOOK, tools=TOOLS, max_output_tokens=count)
        assert first["status"] == "incomplete"
        ask(dictated, ANSWER + END, input="Go on.", previous_response_id=first["id"], tools=TOOLS)


def test_stored_responses_are_shown_and_deleted(dictated: Dictated) -> None:
    client = dictated.client
    # clients may give several items one id
    items = [
        {"role": "user", "id": "msg_1", "content": [{"type": "input_text", "text": t}]}
        for t in ("a", "b", "c")
    ]
    made = ask(dictated, ANSWER, input=items)
    address = f"{PATH}/{made['id']}"
    assert client.get(address).json() == made
    listed = client.get(f"{address}/input_items").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["c", "b", "a"]
    page = client.get(f"{address}/input_items?order=asc&limit=2").json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["a", "b"]
    assert page["has_more"] and page["last_id"] == page["data"][-1]["id"]
    rest = client.get(f"{address}/input_items?order=asc&after={page['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["c"]
    for query in ("order=x", "limit=0", "limit=101", "limit=x", "after=x"):
        error_of(client.get(f"{address}/input_items?{query}"), 400)
    error_of(client.get(f"{address}?stream=true"), 400)
    assert client.delete(address).json() == {
        "id": made["id"],
        "object": "response",
        "deleted": True,
    }
    for method, path in (("GET", address), ("DELETE", address), ("GET", f"{address}/input_items")):
        error_of(client.request(method, path), 404)
    gone = dictated.post(PATH, input="a", previous_response_id=made["id"])
    error = error_of(gone, 404)
    assert (error["param"], error["code"]) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_what_is_not_to_be_kept_is_not(dictated: Dictated) -> None:
    made = ask(dictated, ANSWER, store=False)
    error_of(dictated.client.get(f"{PATH}/{made['id']}"), 404)


def test_stored_responses_outlive_the_server_for_their_key_alone(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    body = {"model": "chat", "input": ASKED, "max_output_tokens": 4, "temperature": 0}

    def server(key: str | None) -> Any:
        return start(api_key=key, response_folder=tmp_path / "responses")

    mine = {"Authorization": "Bearer mine"}
    with server("mine") as client:
        made = client.post(PATH, json=body, headers=mine).json()
        streamed = client.post(PATH, json=body | {"stream": True}, headers=mine).text
        (other,) = set(re.findall(r"resp_[0-9a-f]{48}", streamed))
        error_of(client.get(f"{PATH}/{made['id']}"), 401)
        files = (tmp_path / "responses").iterdir()
        assert {file.name.split(".")[0] for file in files} == {made["id"], other}
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "responses").iterdir()} == {0o600}
    for key, headers in (("yours", {"Authorization": "Bearer yours"}), (None, {})):
        with server(key) as client:
            for method in ("GET", "DELETE"):
                error_of(client.request(method, f"{PATH}/{made['id']}", headers=headers), 404)
            more = body | {"previous_response_id": made["id"]}
            error_of(client.post(PATH, json=more, headers=headers), 404)
    with server("mine") as client:
        assert client.get(f"{PATH}/{made['id']}", headers=mine).json() == made
        more = body | {"previous_response_id": made["id"]}
        assert client.post(PATH, json=more, headers=mine).status_code == 200


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_items_are_found_by_their_ids(
    start: Callable[..., Any], tmp_path: Path, is_on_disk: bool
) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import CALLING, with_template
    from tests.server.stand_in import dictate

    served = ServedModel("own", *with_template(tmp_path / "m", THINKING + CALLING))
    folder = tmp_path / "responses" if is_on_disk else None
    key = {"Authorization": "Bearer mine"}
    asked: dict[str, Any] = {"role": "user", "content": ASKED}
    result = {"type": "function_call_output", "output": "an animal"}
    reply = [f"<think>Hm.</think>Let me see.{LOOK}"]
    with dictate(lambda _: reply[0], "own"):
        client = start(served, api_key="mine", response_folder=folder)
        if is_on_disk:
            with client:
                first = _made(client, key, tools=TOOLS, input=ASKED)
            # after a restart
            client = start(served, api_key="mine", response_folder=folder)
        with client:
            if not is_on_disk:
                first = _made(client, key, tools=TOOLS, input=ASKED)
            kinds = [item["type"] for item in first["output"]]
            assert kinds == ["reasoning", "message", "function_call"]
            reply[0] = ANSWER + END
            result["call_id"] = first["output"][-1]["call_id"]
            named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
            untyped = [{"id": item["id"]} for item in first["output"]]
            sizes = {
                _made(client, key, tools=TOOLS, input=[asked, *items, result])["usage"][
                    "input_tokens"
                ]
                for items in (first["output"], named, untyped)
            }
            assert len(sizes) == 1
            # what was sent by its id is kept with the response that answers it
            second = _made(client, key, tools=TOOLS, input=[asked, *named, result])
            address = f"{PATH}/{second['id']}/input_items?order=asc"
            listed = client.get(address, headers=key).json()["data"]
            assert [item["id"] for item in listed[1:4]] == [item["id"] for item in first["output"]]
            # also an item of the input, by the id that it was given
            _made(client, key, input=[{"type": "item_reference", "id": listed[0]["id"]}])
            missing = [f"msg_{'a' * 48}0", "msg_1", "", "x" * 500]
            client.delete(f"{PATH}/{first['id']}", headers=key)
            unkept = _made(client, key, input=ASKED, store=False)["output"][0]["id"]
            for name in (*missing, named[0]["id"], unkept):
                body = {"model": "own", "input": [asked, {"type": "item_reference", "id": name}]}
                error = error_of(client.post(PATH, json=body, headers=key), 404)
                assert (error["param"], error["code"]) == ("input[1]", "item_not_found")
                assert "Send the item itself" in error["message"]
                assert repr(name)[:40] in error["message"]
        if is_on_disk:
            other = {"Authorization": "Bearer yours"}
            with start(served, api_key="yours", response_folder=folder) as client:
                item = {"type": "item_reference", "id": second["output"][0]["id"]}
                body = {"model": "own", "input": [item]}
                error_of(client.post(PATH, json=body, headers=other), 404)


THINKING = "{# <think></think> #}"


def _made(client: Any, headers: dict[str, str], **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"model": "own", **body}, headers=headers)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_limits_of_stored_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_disk: bool
) -> None:
    now = [1_000_000_000.0]
    monkeypatch.setattr(stored_responses.time, "time", lambda: now[0])
    write, utime = stored_responses._Folder.write, stored_responses.os.utime

    def stamped(folder: Any, name: str, order: int, data: bytes) -> None:
        write(folder, name, order, data)
        utime(folder._path / folder._key(name, order), (now[0], now[0]))

    # files have the time that is given to them here
    monkeypatch.setattr(stored_responses._Folder, "write", stamped)
    monkeypatch.setattr(stored_responses.os, "utime", lambda file: utime(file, (now[0], now[0])))
    folder = tmp_path if is_on_disk else None
    settings = Settings(
        response_folder=folder, kept_responses=3, kept_response_bytes=10_000, kept_response_s=100
    )
    store = StoredResponses(settings)
    names = [new_name() for _ in range(6)]

    def keep(name: str, size: int = 10) -> None:
        now[0] += 1
        store.keep(name, {"a": "x" * size})

    for name in names[:3]:
        keep(name)
    now[0] += 1
    assert store.find(names[0]) is not None
    # the one used longest ago goes first
    keep(names[3])
    assert [store.find(name) is not None for name in names[:4]] == [True, False, True, True]
    keep(names[4], 9_900)
    assert [store.find(name) is not None for name in names[:5]] == [False] * 4 + [True]
    now[0] += 101
    assert store.find(names[4]) is None
    keep(names[5], 20_000)
    assert store.find(names[5]) is None


@pytest.mark.parametrize("restarts", [False, True])
def test_the_clock_does_not_order_stored_responses(tmp_path: Path, restarts: bool) -> None:
    settings = Settings(response_folder=tmp_path, kept_responses=2)
    store = StoredResponses(settings)
    names = [new_name() for _ in range(4)]
    for number, name in enumerate(names):
        assert store.keep(name, {"a": number})
        # the clock goes back by a day each time
        for file in tmp_path.glob(f"{name}.*"):
            os.utime(file, (time.time() + 86_400 * (4 - number),) * 2)
        if restarts:
            store = StoredResponses(settings)
    assert [store.find(name) is not None for name in names] == [False, False, True, True]
    assert store.find(names[2]) == {"a": 2} and store.keep(new_name(), {})
    assert store.find(names[3]) is None and store.find(names[2]) is not None


def test_a_response_that_cannot_be_kept_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device", str(tmp_path))

    store = StoredResponses(Settings(response_folder=tmp_path))

    def opened(handle: int, mode: str) -> Full:
        os.close(handle)
        return Full()

    monkeypatch.setattr(stored_responses.os, "fdopen", opened)
    assert not store.keep(new_name(), {"a": 1})
    assert list(tmp_path.iterdir()) == []
    assert "A response cannot be kept: [Errno 28] No space left" in caplog.text


def test_what_a_killed_writer_left_counts(tmp_path: Path) -> None:
    store = StoredResponses(Settings(response_folder=tmp_path, kept_response_bytes=1000))
    (tmp_path / f"{new_name()}.new").write_bytes(b"x" * 900)
    name = new_name()
    assert store.keep(name, {"a": "x" * 500}) and [f.suffix for f in tmp_path.iterdir()] == [
        ".json"
    ]


def test_damaged_and_foreign_files_are_not_used(tmp_path: Path) -> None:
    store = StoredResponses(Settings(response_folder=tmp_path))
    name, link = new_name(), new_name()
    for data in (
        b"",
        b"[",
        b"[" * 100_000,
        b"[]",
        b'{"owner": 5, "record": {}}',
        b'{"record": {}}',
        b"\xff",
    ):
        (tmp_path / f"{name}.json").write_bytes(data)
        assert store.find(name) is None
    store.keep(name, {"a": 1})
    (tmp_path / f"{link}.json").symlink_to(tmp_path / f"{name}.json")
    assert store.find(name) == {"a": 1} and store.find(link) is None
    for strange in ("", "../x", "resp_", f"{name}/", f"{name}\n", name.upper()):
        assert store.find(strange) is None and not store.remove(strange)
    # what a kill has left
    (tmp_path / f"{name}.new").write_bytes(b"{")
    assert StoredResponses(Settings(response_folder=tmp_path)).find(name) == {"a": 1}
    assert not (tmp_path / f"{name}.new").exists()


def test_the_turns_that_a_template_gets() -> None:
    body = ResponsesRequest.model_validate(
        {
            "instructions": "Be brief.",
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "text": {"format": {"type": "json_object"}, "verbosity": "low"},
            "input": [
                {"type": "message", "role": "developer", "content": "Use tools."},
                {"role": "user", "content": [{"type": "input_text", "text": ASKED}], "id": "x"},
                {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "b3BhcXVl"},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                    "encrypted_content": None,
                },
                {
                    "type": "function_call",
                    "call_id": "t",
                    "name": "look_up",
                    "arguments": '{"a": 1}',
                },
                {"type": "function_call_output", "call_id": "t", "output": "red", "id": "fco"},
            ],
        }
    )
    chat = body.as_chat([])
    function = {"name": "look_up", "arguments": {"a": 1}}
    assert as_templates_read(chat.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": ASKED},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t", "name": "look_up", "content": "red"},
    ]
    assert chat.chat_template_kwargs == {"reasoning_effort": "low"}
    assert chat.grammar == {"type": "object"}


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
def test_reasoning_go_and_come_back(include: list[str]) -> None:
    from mlx_mmfree.generation.answers.answer_parts import Part, TextDelta, ThinkingDelta
    from mlx_mmfree.generation.scheduling import Event
    from mlx_mmfree.server.chat import Conversation

    class Thinking:
        def add(self, text: str) -> list[Part]:
            return [ThinkingDelta("Hm, "), ThinkingDelta("red."), TextDelta(text)]

        def finalize(self) -> list[Part]:
            return []

    class Found:
        make_reader = Thinking

        class served:
            name = "m"

    body = ResponsesRequest.model_validate({"input": ASKED, "store": False, "include": include})
    found: Conversation = Found  # type: ignore[assignment]
    answer = ResponsesAnswer(body, found, StoredResponses(Settings()))
    events = answer.add([(0, Event(0, ANSWER, 5, None, "stop", 3, 0))])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:7] == [
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
        ),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
    ]
    reasoning, _ = answer.whole()["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, red."}]
    assert ("encrypted_content" in reasoning) == bool(include)
    if include:
        # as an agent that keeps nothing else sends it back
        reasoning.pop("content")
    again = ResponsesRequest.model_validate(
        {"input": [{"role": "user", "content": "a"}, reasoning]}
    )
    assert again.as_chat([]).messages[1].reasoning_content == "Hm, red."


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input[0]"),
        ({"tools": [{**TOOLS[0], "strict": "yes"}]}, "tools[0].strict"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": 5}}, "tool_choice"),
        ({"max_output_token": 5}, "max_output_token"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "unheard_of"}]}, "tools[0].type"),
        ({"tools": [{"type": ["web_search"]}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_what_is_refused(dictated: Dictated, changes: dict[str, Any], param: str) -> None:
    response = dictated.post(PATH, **{"input": "a"} | changes)
    error = error_of(response, response.status_code)
    assert response.status_code in (400, 404, 413)
    assert error["param"] == param, error["message"]


def test_tools_that_no_model_can_call_are_left_out(dictated: Dictated) -> None:
    hosted = [{"type": "web_search"}, {"type": "shell", "environment": {"type": "container_auto"}}]
    with_them = ask(dictated, LOOK, tools=[*hosted, *TOOLS], client_metadata={"a": "b"})
    without = ask(dictated, LOOK, tools=TOOLS)
    assert with_them["usage"]["input_tokens"] == without["usage"]["input_tokens"]
    assert [tool["name"] for tool in with_them["tools"]] == ["look_up"]


def test_a_null_in_a_part_is_the_same_as_nothing(dictated: Dictated) -> None:
    tool = {"type": "function", "name": "f", "description": None, "parameters": None}
    answer = ask(dictated, ANSWER + END, tools=[tool])
    assert answer["tools"] == [{**tool, "description": "", "parameters": {}, "strict": None}]


def test_tools_that_are_left_out_take_no_time_for_each_other() -> None:
    class Counted(dict[str, Any]):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return super().__eq__(other)

    hosted = [Counted(type="mcp", server=number) for number in range(100)]
    body = ResponsesRequest.model_validate({"input": ASKED, "tools": [*hosted, *TOOLS]})
    assert [tool.name for tool in body.tools] == ["look_up"]
    assert Counted.compared == 0


def test_a_response_may_be_nested_deeper_than_its_request(dictated: Dictated) -> None:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"items": schema}
    answer = ask(dictated, ANSWER + END, tools=[{**TOOLS[0], "parameters": schema}])
    assert dictated.client.get(f"{PATH}/{answer['id']}").json() == answer


def test_a_failure_is_reported_in_the_stream(
    dictated: Dictated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_mmfree.generation.scheduling import Scheduler

    def breaks(scheduler: Scheduler) -> Any:
        raise RuntimeError("a secret path")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", breaks)
        events = dictated.events(PATH, ANSWER, input=ASKED)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed" and "secret" not in response["error"]["message"]
    error_of(dictated.client.get(f"{PATH}/{response['id']}"), 404)
    ask(dictated, ANSWER)
