"""Conversations as templates take them: the same in every interface, in any order, with broken calls."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.server.conftest import with_template
from tests.server.templates import TEMPLATES

pytestmark = pytest.mark.serve

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CALLING = [name for name in TEMPLATES if name not in ("chatml", "gemma")]
PICTURE = "iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
USER = {"role": "user", "content": "What?"}


class Asked:
    """A client of a server with a model of each template, which tells what the models read."""

    def __init__(self, client: Any):
        self.client = client
        self.prompts: list[str] = []

    def reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return "Yes<|eot_id|>"

    def prompt(self, path: str, model: str, **body: Any) -> str:
        """The prompt that a model reads of a request."""
        limit = {MESSAGES: {"max_tokens": 9}, RESPONSES: {"store": False}}.get(path, {})
        answer = self.client.post(path, json={"model": model, **limit, **body})
        assert answer.status_code == 200, answer.text
        return self.prompts[-1]

    def refusal(self, path: str, model: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json={"model": model, "max_tokens": 9, **body})
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


@pytest.fixture(scope="module")
def asked(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.stand_in import dictate

    folder = tmp_path_factory.mktemp("templates")
    served = [
        ServedModel(name, *with_template(folder / name, template))
        for name, template in TEMPLATES.items()
    ]
    with start(*served) as client:
        made = Asked(client)
        with dictate(made.reply):
            yield made


def tools(path: str) -> list[dict[str, Any]]:
    function = {"name": "find", "description": "Finds."}
    if path == MESSAGES:
        return [function | {"input_schema": SCHEMA}]
    if path == RESPONSES:
        return [{"type": "function", **function, "parameters": SCHEMA, "strict": False}]
    return [{"type": "function", "function": function | {"parameters": SCHEMA}}]


Turn = tuple[str, Any]


def body_of(path: str, turns: list[Turn]) -> dict[str, Any]:
    """A conversation in the format of an interface."""
    return {
        CHAT: lambda: {"messages": list(map(_of_chat, turns))},
        MESSAGES: lambda: {"messages": list(map(_of_messages, turns))},
        RESPONSES: lambda: {"input": [item for turn in turns for item in _items(turn)]},
    }[path]()


def _of_chat(turn: Turn) -> dict[str, Any]:
    role, value = turn
    if role == "tool":
        call, text, has_picture = value
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
        parts = [{"type": "text", "text": text}, *([url] if has_picture else [])]
        return {"role": "tool", "tool_call_id": call, "content": parts}
    if role != "assistant":
        return {"role": role, "content": value}
    reasoning_text, text, calls = value
    named = [
        {"id": call, "type": "function", "function": {"name": "find", "arguments": arguments}}
        for call, arguments in calls
    ]
    message = {"role": role, "content": text, "reasoning_content": reasoning_text}
    return message | ({"tool_calls": named} if calls else {})


def _of_messages(turn: Turn) -> dict[str, Any]:
    role, value = turn
    if role == "tool":
        call, text, has_picture = value
        source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
        picture = [{"type": "image", "source": source}] if has_picture else []
        content = [{"type": "text", "text": text}, *picture]
        block = {"type": "tool_result", "tool_use_id": call, "content": content}
        return {"role": "user", "content": [block]}
    if role != "assistant":
        return {"role": role, "content": value}
    reasoning_text, text, calls = value
    blocks = (
        [{"type": "thinking", "thinking": reasoning_text, "signature": ""}]
        if reasoning_text
        else []
    )
    blocks += [{"type": "text", "text": text}] if text else []
    for call, arguments in calls:
        given: Any = arguments
        if isinstance(arguments, str) and '": ' in arguments and "NaN" not in arguments:
            with suppress(ValueError):
                given = json.loads(arguments)
        blocks.append({"type": "tool_use", "id": call, "name": "find", "input": given})
    return {"role": role, "content": blocks}


def _items(turn: Turn) -> list[dict[str, Any]]:
    role, value = turn
    if role == "tool":
        call, text, has_picture = value
        url = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}
        output = [{"type": "input_text", "text": text}, *([url] if has_picture else [])]
        return [{"type": "function_call_output", "call_id": call, "output": output}]
    if role != "assistant":
        return [{"role": role, "content": value}]
    reasoning_text, text, calls = value
    reasoning = {"type": "reasoning", "summary": []}
    items = (
        [reasoning | {"content": [{"type": "reasoning_text", "text": reasoning_text}]}]
        if reasoning_text
        else []
    )
    items += [{"type": "message", "role": role, "content": text}] if text else []
    return items + [
        {"type": "function_call", "call_id": call, "name": "find", "arguments": arguments}
        for call, arguments in calls
    ]


WHOLE = '{"word": "fox"}'
LOOP: list[Turn] = [
    ("system", "Be brief."),
    ("user", "What is a fox?"),
    ("assistant", ("I look it up.", "Let me see.", [("call_1", WHOLE), ("call_2", "{}")])),
    ("tool", ("call_1", "an animal", True)),
    ("tool", ("call_2", "", False)),
    ("assistant", ("", "", [("call_3", '{"word": "he')])),
    ("tool", ("call_3", "The arguments are no JSON.", False)),
    ("assistant", ("", "An animal.", [])),
    ("user", "And a hen?"),
]


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_conversation_is_the_same_prompt_in_every_interface(asked: Asked, model: str) -> None:
    for turns in (LOOP, LOOP[:2], LOOP[:5], LOOP[:7]):
        prompts = set()
        for path in (CHAT, MESSAGES, RESPONSES):
            offered = {"tools": tools(path)} if model in CALLING else {}
            prompts.add(asked.prompt(path, model, **offered, **body_of(path, turns)))
        (prompt,) = prompts
        if len(turns) > 5:
            assert "a picture was left out" in prompt.lower() and PICTURE not in prompt
            # the broken call as it came, before its result
            assert prompt.index('{"word": "he') < prompt.index("The arguments are no JSON.")


@pytest.mark.parametrize("model", TEMPLATES)
def test_roles_come_in_any_order(asked: Asked, model: str) -> None:
    words = {role: f"word-of-{role}" for role in ("system", "developer", "user")}
    kinds: list[Turn] = [*words.items(), ("assistant", ("", "word-of-answer", []))]
    for first, second, third in itertools.product(kinds, repeat=3):
        turns = [first, second, third, ("user", "last")]
        prompt = asked.prompt(CHAT, model, **body_of(CHAT, turns))
        found = [match.group() for match in re.finditer(r"word-of-\w+|last", prompt)]
        wanted = [*(words.get(role, "word-of-answer") for role, _ in turns[:-1]), "last"]
        assert found == wanted
        assert prompt == asked.prompt(RESPONSES, model, **body_of(RESPONSES, turns))
        if not any(role == "developer" for role, _ in turns):
            assert prompt == asked.prompt(MESSAGES, model, **body_of(MESSAGES, turns))
    # instructions alone, and an answer at the end
    for alone in ([("system", "Be brief.")], [("user", "a"), kinds[-1]]):
        assert alone[0][1] in asked.prompt(CHAT, model, **body_of(CHAT, alone))


def test_chats_go_to_the_template_as_they_came(asked: Asked) -> None:
    messages = [{"role": role, "content": role} for role in ("user", "user", "system", "user")]
    prompt = asked.prompt(CHAT, "chatml", messages=messages)
    assert re.findall("<.start_header_id.>([a-z]+)", prompt) == [
        *("user", "user", "system", "user", "assistant")
    ]


def test_an_order_that_no_arrangement_cures_names_the_message(asked: Asked) -> None:
    # a result without an id, of which the template asks nine characters
    messages = [USER, {"role": "tool", "content": "red"}, USER]
    error = asked.refusal(CHAT, "mistral", messages=messages)
    assert error["param"] == "messages[1]" and "'messages[1]'" in error["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_ids_of_calls_are_as_the_template_wants_them(asked: Asked, path: str) -> None:
    names = ("call_" + 24 * "a", "toolu_01", "abcdefghi", "ab-cd/efg", "", "\u00e4" * 9, "a b")
    for name in names:
        turns: list[Turn] = [
            ("user", "What?"),
            ("assistant", ("", "", [(name, WHOLE), ("other", WHOLE)])),
            ("tool", ("other", "blue", False)),
            ("tool", (name, "red", False)),
        ]
        prompt = asked.prompt(path, "mistral", tools=tools(path), **body_of(path, turns))
        first, second = re.findall(r'"id": "([^"]*)"', prompt)
        found = re.findall(r"\[TOOL_RESULTS\](\S*) (\w+)", prompt)
        assert found == [(second, "blue"), (first, "red")]
        assert first != second and all(re.fullmatch("[0-9a-zA-Z]{9}", x) for x in (first, second))
        assert (first == name) is (name == "abcdefghi")
        # other templates get what the client sends
        assert '"call_id"' not in asked.prompt(path, "qwen3", **body_of(path, turns))


def test_each_call_of_a_template_that_takes_one_has_its_result(asked: Asked) -> None:
    calls = [(f"call_{n}", json.dumps({"word": n})) for n in range(3)]
    calls[1] = ("call_1", "{'word': broken}")
    turns: list[Turn] = [
        ("user", "What?"),
        ("assistant", ("", "", calls)),
        *(("tool", (f"call_{n}", f"result-{n}", False)) for n in (2, 0, 1)),
        ("user", "And?"),
    ]
    for path in (CHAT, MESSAGES, RESPONSES):
        prompt = asked.prompt(path, "llama3", tools=tools(path), **body_of(path, turns))
        order = re.findall(r'"parameters": (\{[^}]*\})|(result-\d)', prompt.split("What?")[1])
        assert [a or b for a, b in order] == [
            *('{"word": 0}', "result-0", "{'word': broken}", "result-1"),
            *('{"word": 2}', "result-2"),
        ]


BROKEN = ['{"word": "fo', "[1, 2]", '"fox"', "5", "fox", '{"word": NaN}', "{]", "<|eot_id|>"]
EMPTY = [None, "", " ", "null", "{}", {}]


@pytest.mark.parametrize("model", TEMPLATES)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_broken_and_empty_arguments_end_no_conversation(
    asked: Asked, path: str, model: str
) -> None:
    def prompt(arguments: Any) -> str:
        turns: list[Turn] = [("user", "What?"), ("assistant", ("", "", [("c", arguments)]))]
        turns += [("tool", ("c", "red", False)), ("user", "And?")]
        body = body_of(path, turns)
        if arguments == "missing":
            body = json.loads(json.dumps(body).replace(', "arguments": "missing"', ""))
            body = json.loads(json.dumps(body).replace(', "input": "missing"', ""))
        return asked.prompt(path, model, **body)

    for arguments in BROKEN:
        read = prompt(arguments)
        assert read.index(arguments) < read.index("red") < read.index("And?")
        assert "find" in read
    assert len({prompt(arguments) for arguments in [*EMPTY, "missing"]}) == 1


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (CHAT, [{"type": "file", "file": {"filename": "a.pdf", "file_data": "x"}}]),
        (MESSAGES, [{"type": "document", "title": "a.pdf", "source": {"type": "base64"}}]),
        (RESPONSES, [{"type": "input_file", "filename": "a.pdf", "file_data": "x"}]),
    ],
)
def test_documents_in_results_are_reported_of(asked: Asked, path: str, parts: Any) -> None:
    turns: list[Turn] = [USER_TURN, ("assistant", ("", "", [("c", WHOLE)])), ("tool", ("c", "", 0))]
    body = body_of(path, turns)
    text = json.dumps(body).replace('[{"type": "text", "text": ""}]', json.dumps(parts))
    text = text.replace('[{"type": "input_text", "text": ""}]', json.dumps(parts))
    prompt = asked.prompt(path, "qwen3", **json.loads(text))
    assert prompt.count("[A document 'a.pdf' was left out: this model reads text alone.]") == 1


USER_TURN: Turn = ("user", "What?")


def test_pictures_that_litellm_moves_out_of_a_result_are_reported_of(asked: Asked) -> None:
    turns: list[Turn] = [
        USER_TURN,
        ("assistant", ("", "", [("c", WHOLE)])),
        ("tool", ("c", "red", False)),
        USER_TURN,
    ]
    body = body_of(CHAT, turns)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    parts = [{"type": "text", "text": "The images of the tool:"}, picture]
    body["messages"][-1]["content"] = parts
    for model in CALLING:
        prompt = asked.prompt(CHAT, model, **body)
        assert "The images of the tool:\n[A picture was left out" in prompt
    # what follows an answer is the user's own
    body["messages"].insert(-1, {"role": "assistant", "content": "Yes"})
    assert "read no pictures" in asked.refusal(CHAT, "qwen3", **body)["message"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "http://a.example"}}),
        (RESPONSES, {"type": "input_image", "image_url": "data:image/png;base64,"}),
    ],
)
def test_pictures_of_the_user_are_refused_with_a_way_on(
    asked: Asked, path: str, part: dict[str, Any]
) -> None:
    turns = [{"role": "user", "content": [part]}]
    name = "input" if path == RESPONSES else "messages"
    body: dict[str, Any] = {"model": "qwen3", name: turns}
    if path == MESSAGES:
        body["max_tokens"] = 9
    answer = asked.client.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "read no pictures" in message and "describe it as text" in message


def test_what_litellm_adds_to_a_chat_changes_nothing(asked: Asked) -> None:
    cache = {"cache_control": {"type": "ephemeral"}}
    fields = {"provider_specific_fields": {"a": 1}}
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": WHOLE}}
    plain = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "red"},
        {"role": "assistant", "content": "", "reasoning_content": "Red."},
        USER,
    ]
    block = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    nothing = {
        "refusal": "",
        "reasoning_details": [],
        "images": [],
        "annotations": [],
        "audio": None,
    }
    decorated: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **cache}]},
        {**USER, **cache},
        {
            **{
                "role": "assistant",
                "content": None,
                "thinking_blocks": [block],
                **fields,
                **nothing,
            },
            "tool_calls": [
                {**call, **fields, "index": 0, "function": call["function"] | fields}  # type: ignore[operator]
            ],
        },
        {**plain[3], **cache},
        {"role": "assistant", "content": None, "reasoning_content": "Red.", "function_call": None},
        USER,
    ]
    offered = [{**tools(CHAT)[0], **cache}]
    want = asked.prompt(CHAT, "qwen3", messages=plain, tools=tools(CHAT))
    assert asked.prompt(CHAT, "qwen3", messages=decorated, tools=offered) == want
    assert "<think>Hm.</think>" in want and "<think>Red.</think>" in want


def test_parts_of_a_text_do_not_run_into_each_other(asked: Asked) -> None:
    for texts, want in ((["Be", "brief."], "Be\nbrief."), (["Be ", "brief."], "Be brief.")):
        parts = [{"type": "text", "text": text} for text in texts]
        items = [{"type": "input_text", "text": text} for text in texts]
        prompts = {
            asked.prompt(CHAT, "qwen3", messages=[{"role": "user", "content": parts}]),
            asked.prompt(MESSAGES, "qwen3", messages=[{"role": "user", "content": parts}]),
            asked.prompt(RESPONSES, "qwen3", input=[{"role": "user", "content": items}]),
        }
        (prompt,) = prompts
        assert want in prompt
