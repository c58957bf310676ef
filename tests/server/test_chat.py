"""Answers to conversations: templates, tools, schemas, probabilities."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree import generate
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from mlx_mmfree.tokenizer.chat import REASONING_KEYS
from tests.server.conftest import stream

pytestmark = pytest.mark.serve

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello there"}]


def chat(client: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "chat", "messages": USER, "temperature": 0, "max_tokens": 8} | body
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(client: Any, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"model": "chat", "messages": USER} | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_an_answer_is_that_of_generate(client: Any, chat_model: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = chat_model
    answer = chat(client)
    (choice,) = answer["choices"]
    ids = tokenizer.apply_chat_template(USER)
    want = generate(model, tokenizer, ids, max_tokens=8)
    assert choice["message"] == {"role": "assistant", "content": want, "refusal": None}
    assert choice["finish_reason"] in ("length", "stop")
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_stream_is_the_same_answer(client: Any) -> None:
    body = {"model": "chat", "messages": USER, "max_tokens": 8, "n": 2}
    chunks = stream(client, PATH, **body, stream_options={"include_usage": True})
    texts = ["", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"] if len(chunk["choices"]) == 1 else [chunk["choices"][0]]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts == 2 * [chat(client)["choices"][0]["message"]["content"]]
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_messages_come_in_every_format(client: Any) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    want = chat(client)["choices"]
    assert chat(client, messages=[{"role": "user", "content": parts}])["choices"] == want
    system = [{"role": "system", "content": "Be brief."}, *USER]
    developer = [{"role": "developer", "content": "Be brief."}, *USER]
    assert chat(client, messages=system)["choices"] == chat(client, messages=developer)["choices"]
    # as clients send back what they were answered
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []}
    chat(client, messages=[*USER, answer | {"audio": None, "tool_calls": None}, *USER])


def test_both_names_of_the_limit(client: Any) -> None:
    assert chat(client, max_completion_tokens=3, max_tokens=None)["usage"]["completion_tokens"] == 3
    assert chat(client, max_completion_tokens=8)["usage"]["completion_tokens"] == 8
    assert refusal(client, max_completion_tokens=3, max_tokens=4)["param"] == "max_tokens"


def test_log_probabilities(client: Any) -> None:
    (choice,) = chat(client, logprobs=True, top_logprobs=2)["choices"]
    entries = choice["logprobs"]["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode("utf-8", "replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        # greedy: the chosen token is the likeliest
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert refusal(client, top_logprobs=2)["param"] == "top_logprobs"


def test_a_conversation_that_comes_again_is_not_read_again(client: Any) -> None:
    system = {"role": "system", "content": "You are a fox who knows the wood and its paths well."}
    asked = [system, {"role": "user", "content": "Where is the river?"}]
    first = chat(client, messages=asked)
    answer = first["choices"][0]["message"]["content"]
    more = [*asked, {"role": "assistant", "content": answer}, *USER]
    usage = chat(client, messages=more)["usage"]
    # at least up to the end of the question, however the answer is rendered
    known = usage["prompt_tokens_details"]["cached_tokens"]
    assert known >= first["usage"]["prompt_tokens"] - 8
    # another conversation with the same system prompt begins after it
    other = chat(client, messages=[system, {"role": "user", "content": "Who are you?"}])["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_base_model_answers_no_messages(client: Any) -> None:
    response = client.post(PATH, json={"model": "demo", "messages": USER})
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]
    assert "/v1/completions" in response.json()["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["fox", "hen"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_follows_its_schema(client: Any, temperature: float) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    for seed in range(3):
        answer = chat(
            client,
            response_format=format,
            max_tokens=200,
            temperature=temperature,
            seed=seed,
            n=2,
        )
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            value = json.loads(choice["message"]["content"])
            assert sorted(value) == ["age", "kind", "name"]
            assert len(value["name"]) <= 5 and value["kind"] in ("fox", "hen")
            assert isinstance(value["age"], int) and 0 <= value["age"] <= 99


@pytest.mark.parametrize("unused", [1, 70])
def test_logits_without_a_text_are_never_chosen(
    start: Callable[..., Any], tmp_path: Path, unused: int
) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import with_template

    format = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    with start(ServedModel("m", *with_template(tmp_path / "m", None, unused))) as client:
        (shown,) = chat(client, model="m", logprobs=True, top_logprobs=20)["choices"]
        assert all(len(token["top_logprobs"]) <= 20 for token in shown["logprobs"]["content"])
        options = {"temperature": 2, "seed": 1, "n": 4, "max_tokens": 200}
        for choice in chat(client, model="m", response_format=format, **options)["choices"]:
            assert json.loads(choice["message"]["content"])["kind"] in ("fox", "hen")


@pytest.mark.parametrize("more", [1, 70])
def test_a_tokenizer_may_have_more_tokens_than_the_model(
    start: Callable[..., Any], tmp_path: Path, more: int
) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import with_template

    model, tokenizer = with_template(tmp_path / "m", None, -more)
    assert tokenizer.vocab_size == model.vocab_size + more
    assert tokenizer.special_tokens["<more0>"] == model.vocab_size
    format = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    with start(ServedModel("m", model, tokenizer)) as client:
        options = {"temperature": 2, "seed": 1, "n": 4, "max_tokens": 200}
        for choice in chat(client, model="m", response_format=format, **options)["choices"]:
            assert json.loads(choice["message"]["content"])["kind"] in ("fox", "hen")
        tokens = {"type": "json_object"}
        assert chat(client, model="m", response_format=tokens, max_tokens=9)["choices"]
        missing = [model.vocab_size, tokenizer.vocab_size - 1]
        for body in ({"prompt": missing}, {"prompt": "a", "logit_bias": {str(missing[0]): 5}}):
            answer = client.post("/v1/completions", json={"model": "m", **body})
            assert answer.status_code == 400
            assert f"{missing[0]}" in answer.json()["error"]["message"]
        answer = client.post("/v1/embeddings", json={"model": "m", "input": [missing]})
        assert answer.status_code == 400
        answer = client.post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert answer.status_code == 200


def test_an_answer_is_an_object(client: Any) -> None:
    body = {"response_format": {"type": "json_object"}, "temperature": 1, "seed": 4}
    (choice,) = chat(client, max_tokens=400, **body)["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "http://example.com/x"},
        {"type": "string", "pattern": "(((("},
        {"enum": []},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        False,
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(client: Any, schema: Any) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert refusal(client, response_format=format)["param"] == "response_format"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]


def test_a_template_without_tools_refuses_them(client: Any) -> None:
    error = refusal(client, tools=TOOLS)
    assert error["param"] == "tools" and "tools" in error["message"]
    chat(client, tools=TOOLS, tool_choice="none")
    assert refusal(client, tool_choice="required")["param"] == "tool_choice"


QWEN = """{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>' }}
{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}
{{ 'Return {"name": <function-name>, "arguments": <args-json-object>} in <tool_call></tool_call>' }}
{%- endif %}
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{ '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{ '</tool_call>' }}{% endfor %}{%- endfor %}"""


def test_tools_reach_a_template_that_knows_them(start: Callable[..., Any], tmp_path: Path) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import with_template

    model, tokenizer = with_template(tmp_path / "qwen", QWEN)
    called = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"word": "fox"}'},
    }
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "an animal"},
    ]
    with start(ServedModel("qwen", model, tokenizer)) as client:
        answer = chat(client, model="qwen", tools=TOOLS, messages=messages)
        without = chat(client, model="qwen", messages=messages)
        wrong = [*USER, {**messages[1], "tool_calls": [called | {"function": {}}]}]
        error = refusal(client, model="qwen", messages=wrong)
    as_read = [{**messages[1], "content": "", "tool_calls": [called | {}]}]
    as_read[0]["tool_calls"][0]["function"] = {"name": "look_up", "arguments": {"word": "fox"}}
    ids = tokenizer.apply_chat_template([USER[0], *as_read, messages[2]], tools=TOOLS)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert without["usage"]["prompt_tokens"] < len(ids)
    assert error["param"] == "messages[1].tool_calls[0].function.name"


def test_reasoning_comes_under_each_name(start: Callable[..., Any], tmp_path: Path) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import with_template

    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    model, tokenizer = with_template(tmp_path / "thinking", template)
    with start(ServedModel("thinking", model, tokenizer)) as client:
        sizes = {
            chat(client, model="thinking", messages=[*USER, answer, *USER])["usage"][
                "prompt_tokens"
            ]
            for name in REASONING_KEYS
            for answer in [{"role": "assistant", "content": "Hi", name: "A long reasoning."}]
        }
    text = "Hello thereA long reasoning.HiHello there"
    # the template writes no first token, and none is added
    assert sizes == {len(tokenizer.encode(text, add_special_tokens=False))}


LLAMA = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{{ 'Answer as {"name": function name, "parameters": dictionary}' }}{{ messages[0].content }}"""


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["tagged", "bare"])
def test_a_call_can_be_forced(start: Callable[..., Any], tmp_path: Path, template: str) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import with_template

    kind = {"$ref": "#/$defs/kind"}
    schema = {"properties": {"kind": kind}, "required": ["kind"], "additionalProperties": False}
    schema |= {"type": "object", "$defs": {"kind": {"enum": ["fox", "hen"]}}}
    other = {"type": "function", "function": {"name": "draw", "parameters": schema}}
    tools = [*TOOLS, other]
    body: dict[str, Any] = {"model": "m", "tools": tools, "max_tokens": 300, "n": 2}
    named = {"type": "function", "function": {"name": "draw"}}
    with start(ServedModel("m", *with_template(tmp_path / "m", template))) as client:
        for choice in chat(client, tool_choice=named, temperature=1.5, seed=1, **body)["choices"]:
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "draw"
            assert json.loads(call["function"]["arguments"])["kind"] in ("fox", "hen")
        streamed = stream(
            client, PATH, messages=USER, tool_choice=named, **body | {"temperature": 0}
        )
        calls = [
            call
            for chunk in streamed
            for choice in chunk["choices"]
            for call in choice["delta"].get("tool_calls", [])
        ]
        names = [call["function"]["name"] for call in calls if "id" in call]
        assert names == ["draw", "draw"]
        (first, _) = chat(client, tool_choice="required", logit_bias={}, **body)["choices"]
        if first["finish_reason"] != "length":
            (call,) = first["message"]["tool_calls"]
            assert call["function"]["name"] in ("draw", "look_up")
        missing = {"type": "function", "function": {"name": "run"}}
        error = refusal(client, model="m", tools=tools, tool_choice=missing)
        assert error["param"] == "tool_choice"
        bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]
        assert refusal(client, model="m", tools=bad, tool_choice="required")["param"] == "tools"


def test_one_call_can_be_the_most(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_mmfree.server import chat as module
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import with_template

    asked: list[Any] = []
    make = module.text_requests
    monkeypatch.setattr(
        module,
        "text_requests",
        lambda *a, **options: asked.append(options) or make(*a, **options),
    )
    schema = {"properties": {"kind": {"enum": ["fox"]}}, "required": ["kind"]}
    schema |= {"type": "object", "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "draw", "parameters": schema}}]
    body: dict[str, Any] = {"model": "m", "tools": tools, "max_tokens": 200}
    with start(ServedModel("m", *with_template(tmp_path / "m", QWEN))) as client:
        chat(client, **body)
        answer = chat(client, parallel_tool_calls=False, tool_choice="required", **body)
        chat(client, parallel_tool_calls=False)
    assert [options["ending"] is not None for options in asked] == [False, True, False]
    # the call is read though the text ends before its last tag
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "draw", "arguments": '{"kind": "fox"}'}


def test_variables_of_the_template(start: Callable[..., Any], tmp_path: Path) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.conftest import with_template

    template = "{{ messages[0].content }}{% if thinks %} thinks{% endif %}{{ mood }}"
    served = ServedModel("t", *with_template(tmp_path / "t", template))
    with start(served, template_variables={"mood": " so gladly"}) as client:
        plain = chat(client, model="t")["usage"]["prompt_tokens"]
        thinks = chat(client, model="t", chat_template_kwargs={"thinks": True, "mood": ""})
        error = refusal(client, model="t", chat_template_kwargs={"messages": []})
    tokenizer = served.tokenizer
    assert plain == len(tokenizer.apply_chat_template(USER, mood=" so gladly"))
    assert thinks["usage"]["prompt_tokens"] == len(
        tokenizer.apply_chat_template(USER, thinks=True, mood="")
    )
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "end with a text of the role 'assistant'",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "after other messages"),
        ({"response_format": {"type": "json_object"}}, "begins with its first token"),
    ],
)
def test_what_cannot_go_on_is_refused(client: Any, fields: dict[str, Any], words: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = {"model": "chat", "messages": messages, "continue_final_message": True} | fields
    response = client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "continue_final_message")
    assert words in error["message"]
