"""Tools of `/v1/responses` that run at the client: namespaces, custom tools, shells and patches."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.server.bodies.tools import KINDS
from tests.server.conftest import CALLING, Dictated, with_template
from tests.server.test_refusals import error_of

pytestmark = pytest.mark.serve

PATH = "/v1/responses"
CODEX = json.loads((Path(__file__).parents[1] / "data" / "codex_request.json").read_text())
FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}
EXEC = {"type": "custom", "name": "exec", "description": "Runs code."}
NOTES = {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [FIND, EXEC]}
BUILT_IN = [{"type": kind} for kind in ("local_shell", "shell", "apply_patch")]


class Asked(Dictated):
    """A client of a model that writes given texts, and what it read last."""

    prompt = ""

    def next(self, conversation: str) -> str:
        self.prompt = conversation
        return super().next(conversation)

    def ask(self, *texts: str, **body: Any) -> dict[str, Any]:
        response = self.post(PATH, *texts, **{"input": "What?", "store": False} | body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest.fixture(scope="module")
def asked(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.stand_in import dictate

    model = with_template(tmp_path_factory.mktemp("client_tools") / "m", CALLING)
    with start(ServedModel("m", *model)) as client:
        made = Asked(client)
        with dictate(made.next, "m"):
            yield made


def call(name: str, arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{written}</tool_call><|eot_id|>"


def test_a_request_of_codex_reaches_the_prompt(asked: Asked) -> None:
    response = asked.post(PATH, "Four.<|eot_id|>", **CODEX | {"model": "m", "stream": True})
    assert response.status_code == 200 and "response.completed" in response.text
    offered = json.loads(asked.prompt[: asked.prompt.index("]\nReturn ") + 1])
    names = [tool["function"]["name"] for tool in offered]
    functions = [tool["name"] for tool in CODEX["tools"] if tool["type"] == "function"]
    assert set(functions) < set(names)
    assert "mcp__notes__read_note" in names and "multi_agent_v1__spawn_agent" in names
    assert "web_search" not in asked.prompt
    for item in CODEX["input"]:
        assert item["content"][0]["text"] in asked.prompt
    # what it sends after a call in a namespace
    called = {"type": "function_call", "call_id": "call_1", "id": "fc_1", "status": "completed"}
    called |= {"name": "read_note", "namespace": "mcp__notes", "arguments": '{"title": "a"}'}
    output = [
        {"type": "input_text", "text": "Wall time: 0.1"},
        {"type": "input_text", "text": "crimson"},
    ]
    result = {"type": "function_call_output", "call_id": "call_1", "output": output}
    asked.ask(
        "Red.<|eot_id|>",
        **CODEX | {"model": "m", "stream": False} | {"input": [*CODEX["input"], called, result]},
    )
    written = '{"name": "mcp__notes__read_note", "arguments": {"title": "a"}}'
    assert asked.prompt.index(written) < asked.prompt.index("Wall time: 0.1\ncrimson")


CALLS: list[tuple[dict[str, Any], str, Any, dict[str, Any]]] = [
    (FIND, "find", {"a": 1}, {"type": "function_call", "name": "find", "arguments": '{"a": 1}'}),
    (
        NOTES,
        "mcp__notes__find",
        {},
        {"type": "function_call", "name": "find", "namespace": "mcp__notes", "arguments": "{}"},
    ),
    (
        EXEC,
        "exec",
        {"input": 'a\n"b"'},
        {"type": "custom_tool_call", "name": "exec", "input": 'a\n"b"'},
    ),
    # the only text is the input under any name
    (EXEC, "exec", {"code": "x"}, {"type": "custom_tool_call", "name": "exec", "input": "x"}),
    (
        NOTES,
        "mcp__notes__exec",
        {"input": "x"},
        {"type": "custom_tool_call", "name": "exec", "namespace": "mcp__notes", "input": "x"},
    ),
    (
        BUILT_IN[0],
        "local_shell",
        {"command": ["ls"]},
        {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls"]}},
    ),
    (
        BUILT_IN[1] | {"environment": {"type": "local"}},
        "shell",
        {"commands": ["ls"]},
        {
            "type": "shell_call",
            "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
        },
    ),
    (
        BUILT_IN[2],
        "apply_patch",
        {"type": "delete_file", "path": "a"},
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
    ),
]


@pytest.mark.parametrize(("tool", "name", "arguments", "item"), CALLS)
def test_calls_come_back_in_their_own_format(
    asked: Asked, tool: dict[str, Any], name: str, arguments: Any, item: dict[str, Any]
) -> None:
    answer = asked.ask(call(name, arguments), tools=[tool])
    (made,) = answer["output"]
    assert {key: value for key, value in made.items() if key not in ("id", "call_id")} == {
        **item,
        "status": "completed",
    }
    assert f'"{name}"' in asked.prompt
    assert made["id"].startswith(
        KINDS[item["type"].removesuffix("_call").replace("custom_tool", "custom")].prefix + "_"
    )
    # a stream has the same item
    events = asked.events(PATH, call(name, arguments), input="What?", store=False, tools=[tool])
    kinds = [event["type"].removeprefix("response.") for event in events]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [{**done[0], "id": 0, "call_id": 0}] == [{**made, "id": 0, "call_id": 0}]
    added = events[kinds.index("output_item.added")]["item"]
    assert (added["id"], added["type"], added["status"]) == (
        done[0]["id"],
        item["type"],
        "in_progress",
    )
    if item["type"] == "custom_tool_call":
        texts = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
        whole = [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"]
        assert added["input"] == "" and ["".join(texts)] == whole == [item["input"]]
    elif item["type"] != "function_call":
        assert not any("delta" in kind for kind in kinds)
    # and it can be sent back, with its result
    output: dict[str, Any] = {"type": f"{made['type']}_output", "call_id": made["call_id"]}
    output["output"] = "crimson"
    if item["type"] == "shell_call":
        outcome = {"type": "exit", "exit_code": 1}
        output["output"] = [{"stdout": "crimson", "stderr": "bad", "outcome": outcome}]
    elif item["type"] == "local_shell_call":
        output["id"] = output.pop("call_id")
    elif item["type"] == "apply_patch_call":
        output["status"] = "completed"
    user = {"role": "user", "content": "What?"}
    asked.ask("Red.<|eot_id|>", tools=[tool], input=[user, made, output])
    given = {"input": "x"} if arguments == {"code": "x"} else arguments
    written = json.dumps({"name": name, "arguments": given})
    assert asked.prompt.index(written) < asked.prompt.index("crimson")
    if item["type"] == "shell_call":
        assert "crimson\nbad\n[exit code 1]" in asked.prompt


def test_a_conversation_with_client_tools_goes_on_by_its_name(asked: Asked) -> None:
    first = asked.ask(call("mcp__notes__exec", {"input": "x"}), tools=[NOTES], store=True)
    made = first["output"][0]
    result = {"type": "custom_tool_call_output", "call_id": made["call_id"], "output": "crimson"}
    asked.ask("Red.<|eot_id|>", input=[result], previous_response_id=first["id"], tools=[NOTES])
    written = '{"name": "mcp__notes__exec", "arguments": {"input": "x"}}'
    assert asked.prompt.index(written) < asked.prompt.index("crimson")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "find"}, "mcp__notes__find"),
        ({"type": "function", "name": "find", "namespace": "mcp__notes"}, "mcp__notes__find"),
        ({"type": "custom", "name": "exec"}, "mcp__notes__exec"),
        ({"type": "shell"}, "shell"),
    ],
)
def test_each_of_them_can_be_chosen(asked: Asked, choice: dict[str, Any], name: str) -> None:
    # the grammar of the forced call lets nothing else through
    arguments = {"mcp__notes__exec": {"input": "x"}, "shell": {"commands": ["ls"]}}.get(name, {})
    text = (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|eot_id|>"
    )
    answer = asked.ask(text, tools=[NOTES, BUILT_IN[1]], tool_choice=choice, max_output_tokens=99)
    assert answer["output"][0]["type"] in ("function_call", "custom_tool_call", "shell_call")
    assert answer["tool_choice"] == choice


def test_the_format_of_a_custom_tool_is_reported(asked: Asked) -> None:
    format = {"type": "grammar", "syntax": "lark", "definition": 'start: "begin-of-patch"'}
    answer = asked.ask("Yes<|eot_id|>", tools=[EXEC | {"format": format}])
    assert "begin-of-patch" in asked.prompt
    assert answer["tools"] == [EXEC | {"format": format}]


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([FIND, FIND], "a name of its own"),
        ([{"type": "function", "name": "shell"}, BUILT_IN[1]], "'shell'"),
        ([NOTES, {**FIND, "name": "mcp__notes__find"}], "'mcp__notes__find'"),
        ([{**NOTES, "name": "n" * 125}], "at most 128 characters with its namespace"),
        ([{**NOTES, "tools": [{"type": "web_search"}]}], "'web_search'"),
        ([{"type": "custom"}], "must have a 'name'"),
        ([{"type": "custom", "name": "x", "parameters": {"a": 1}}], "'parameters'"),
        ([{"type": "web_search"}], "runs at the client"),
        ([{"type": "unheard_of", "name": "x"}], "'tools[0].type'"),
    ],
)
def test_what_cannot_be_offered_is_refused_by_name(
    asked: Asked, tools: list[dict[str, Any]], words: str
) -> None:
    error = error_of(asked.post(PATH, input="a", tools=tools), 400)
    assert words in error["message"] and error["param"].startswith("tools")
