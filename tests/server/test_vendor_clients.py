"""The clients of Anthropic and OpenAI, as they are, against a server whose model writes given texts."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mmfree.hub import save_model
from tests.server.conftest import CALLING, with_template
from tests.server.process import ServerProcess

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("default"),
]

KEY = "of-the-tests"
ANSWER = "A fox is an animal."
SCRIPT = [
    ("What is a fox?", f"{ANSWER}<|eot_id|>"),
    (
        "Look it up.",
        'I look.\n<tool_call>{"name": "look_up", "arguments": {"word": "fox"}}</tool_call><|eot_id|>',
    ),
    ("red and quick", "It is red.<|eot_id|>"),
]
FIRST = """
from tests.server.stand_in import dictate, scripted
told = dictate(scripted({script!r}))
told.__enter__()
"""
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("model")
    model, _ = with_template(root / "tokenizer", CALLING)
    save_model(root / "m", model, root / "tokenizer")
    flags = ["--model", root / "m", "--api-key", KEY, "--session-dir", root / "sessions"]
    with ServerProcess(*flags, first=FIRST.format(script=SCRIPT)) as server:
        yield server


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def openai_client(server: ServerProcess) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CLAUDE_TOOL = {"name": "look_up", "description": "Looks up.", "input_schema": PARAMETERS}


def test_anthropic_answers_streams_and_counts(claude: Any) -> None:
    options: dict[str, Any] = {
        "model": "m",
        "max_tokens": 100,
        "system": "Be brief.",
        "messages": [asked("What is a fox?")],
    }
    whole = claude.messages.create(**options)
    assert [block.text for block in whole.content] == [ANSWER]
    assert whole.stop_reason == "end_turn" and whole.usage.output_tokens > 0
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == ANSWER
        last = stream.get_final_message()
    assert last.content[0].text == ANSWER and last.usage.output_tokens == whole.usage.output_tokens
    options.pop("max_tokens")
    counted = claude.messages.count_tokens(**options).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    stopped = claude.messages.create(**options, max_tokens=100, stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")


def test_anthropic_calls_tools(claude: Any) -> None:
    options: dict[str, Any] = {"model": "m", "max_tokens": 100, "tools": [CLAUDE_TOOL]}
    messages: list[Any] = [asked("Look it up.")]
    with claude.messages.stream(**options, messages=messages) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    assert "input_json" in kinds and first.stop_reason == "tool_use"
    spoken, call = first.content
    assert spoken.text.startswith("I look.") and call.input == {"word": "fox"}
    assert claude.messages.create(**options, messages=messages).content[1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "red and quick"}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(**options, messages=messages).content[0].text == "It is red."


def test_anthropic_runs_tools_by_itself(claude: Any) -> None:
    from anthropic import beta_tool

    looked: list[str] = []

    @beta_tool
    def look_up(word: str) -> str:
        """Looks a word up."""
        looked.append(word)
        return "red and quick"

    runner = claude.beta.messages.tool_runner(
        model="m", max_tokens=100, tools=[look_up], messages=[asked("Look it up.")]
    )
    assert runner.until_done().content[0].text == "It is red." and looked == ["fox"]


def test_anthropic_tells_errors_apart(claude: Any) -> None:
    import anthropic

    create = claude.messages.create
    options: dict[str, Any] = {"max_tokens": 5, "messages": [asked("a")]}
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(model="other", **options)
    assert missing.value.body["error"]["type"] == "not_found_error"
    picture = {"type": "image", "source": {"type": "url", "url": "http://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="no pictures"):
        create(model="m", **options | {"messages": [asked("a") | {"content": [picture]}]})
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model="m", **options)
    # by the other header
    other = anthropic.Anthropic(base_url=claude.base_url, auth_token=KEY, max_retries=0)
    assert other.messages.create(model="m", **options).content


OPENAI_TOOL = {"type": "function", "name": "look_up", "parameters": PARAMETERS, "strict": False}


def test_openai_responds_and_streams(openai_client: Any) -> None:
    create = openai_client.responses.create
    whole = create(model="m", input="What is a fox?", instructions="Be brief.")
    assert whole.output_text == ANSWER and whole.status == "completed"
    with openai_client.responses.stream(model="m", input="What is a fox?") as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert last.output_text == ANSWER and last.usage.output_tokens == whole.usage.output_tokens
    format = {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}
    # the schema wins over what the model is made to write
    bound = create(model="m", input="a", text={"format": format}, max_output_tokens=16)
    assert bound.output_text.lstrip().startswith("{") and bound.output_text != ANSWER


def test_openai_goes_on_from_stored_responses(openai_client: Any) -> None:
    import openai

    client = openai_client.responses
    options: dict[str, Any] = {"model": "m", "tools": [OPENAI_TOOL]}
    first = client.create(**options, input="Look it up.")
    spoken, call = first.output
    assert json.loads(call.arguments) == {"word": "fox"} and spoken.content[0].text
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "red and quick"}
    second = client.create(**options, input=[result], previous_response_id=first.id)
    assert second.output_text == "It is red."
    # all of it sent again, as the client has it
    items: list[Any] = [asked("Look it up."), *first.output, result]
    assert client.create(**options, input=items, store=False).output_text == "It is red."
    assert client.retrieve(first.id).output == first.output
    listed = client.input_items.list(first.id)
    assert [item.content[0].text for item in listed] == ["Look it up."]
    client.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.create(**options, input="And?", previous_response_id=second.id)
    assert gone.value.code == "previous_response_not_found"


def test_openai_tells_errors_of_responses_apart(openai_client: Any) -> None:
    import openai

    create = openai_client.responses.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="other", input="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="m", input="a", background=True)
    assert refused.value.param == "background"
    with pytest.raises(openai.AuthenticationError):
        openai_client.with_options(api_key="wrong").responses.create(model="m", input="a")
