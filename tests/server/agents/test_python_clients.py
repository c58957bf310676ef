"""One conversation through the Python clients of both vendors and of those who build on them."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.server.agents.models import (
    AGAIN,
    ANIMALS,
    BROKEN,
    CALLS,
    DESCRIPTION,
    FIRST,
    FOX_ANSWER,
    LATER,
    MODELS,
    OWL_ANSWER,
    PARAMETERS,
    PICTURE,
    REASONING,
    REFUSED,
    SYSTEM,
    WORDS,
    Server,
    without_ids,
)

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

DATA_URL = f"data:image/png;base64,{PICTURE}"


@dataclass
class Seen:
    """A conversation as a client saw it.

    Attributes:
        texts: The answers.
        calls: The calls, each with its arguments.
        reasoning: All reasoning that was shown.
    """

    texts: list[str] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reasoning: str = ""


def _chat_tool() -> dict[str, Any]:
    function = {"name": "look_up", "description": DESCRIPTION, "parameters": PARAMETERS}
    return {"type": "function", "function": function}


def _chat_history(arguments: str = BROKEN) -> list[Any]:
    broken = {"name": "look_up", "arguments": arguments}
    calls = [{"id": "call_0", "type": "function", "function": broken}]
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": REFUSED},
        {"role": "assistant", "content": AGAIN},
        {"role": "user", "content": LATER},
    ]


def _chat_result(call: str, word: str) -> dict[str, Any]:
    content: Any = WORDS[word]
    if word == "owl":
        picture = {"type": "image_url", "image_url": {"url": DATA_URL}}
        content = [{"type": "text", "text": content}, picture]
    return {"role": "tool", "tool_call_id": call, "content": content}


def _chat(
    seen: Seen, send: Callable[[list[Any]], Any], messages: list[Any], dump: Callable[[Any], Any]
) -> None:
    """Goes on with a conversation in the format of chats until the last answer."""
    for question in (None, ANIMALS):
        if question is not None:
            messages.append({"role": "user", "content": question})
        reply = send(messages)
        while reply.tool_calls:
            seen.reasoning += getattr(reply, "reasoning_content", None) or ""
            messages.append(dump(reply))
            for call in reply.tool_calls:
                given = json.loads(call.function.arguments)
                seen.calls.append((call.function.name, given))
                messages.append(_chat_result(call.id, given["word"]))
            reply = send(messages)
        seen.texts.append(reply.content)
        messages.append(dump(reply))


def openai_chat(url: str, model: str, streams: bool) -> Seen:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def send(messages: list[Any]) -> Any:
        options = {"model": model, "messages": messages, "tools": [_chat_tool()]}
        if not streams:
            return client.chat.completions.create(**options).choices[0].message
        with client.chat.completions.stream(**options) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0].message

    seen = Seen()
    _chat(seen, send, _chat_history(), lambda reply: reply.to_dict())
    return seen


def _items() -> list[Any]:
    broken = {"type": "function_call", "call_id": "call_0", "name": "look_up", "arguments": BROKEN}
    return [
        {"role": "user", "content": FIRST},
        broken,
        {"type": "function_call_output", "call_id": "call_0", "output": REFUSED},
        {"role": "assistant", "content": AGAIN},
        {"role": "user", "content": LATER},
    ]


def _item_result(call: str, word: str) -> dict[str, Any]:
    output: Any = WORDS[word]
    if word == "owl":
        picture = {"type": "input_image", "detail": "auto", "image_url": DATA_URL}
        output = [{"type": "input_text", "text": output}, picture]
    return {"type": "function_call_output", "call_id": call, "output": output}


def _responses(url: str, model: str, streams: bool, keeps: bool) -> Seen:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).responses
    tool = {"type": "function", "name": "look_up", "parameters": PARAMETERS, "strict": False}
    tool |= {"description": DESCRIPTION}
    seen, last = Seen(), None

    def send(items: list[Any]) -> Any:
        options = {"model": model, "input": items, "tools": [tool], "instructions": SYSTEM}
        if keeps and last is not None:
            options["previous_response_id"] = last.id
        if not keeps:
            options["store"] = False
        if not streams:
            return client.create(**options)
        with client.stream(**options) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    items: list[Any] = _items()
    for question in (None, ANIMALS):
        if question is not None:
            items.append({"role": "user", "content": question})
        while True:
            last = send(items)
            assert last.status == "completed"
            items = [] if keeps else items + [item.to_dict() for item in last.output]
            calls = [item for item in last.output if item.type == "function_call"]
            for item in last.output:
                if item.type == "reasoning" and calls:
                    seen.reasoning += "".join(part.text for part in item.content)
            for call in calls:
                given = json.loads(call.arguments)
                seen.calls.append((call.name, given))
                items.append(_item_result(call.call_id, given["word"]))
            if not calls:
                break
        seen.texts.append(last.output_text)
    return seen


def openai_responses(url: str, model: str, streams: bool) -> Seen:
    return _responses(url, model, streams, keeps=False)


def openai_stored_responses(url: str, model: str, streams: bool) -> Seen:
    return _responses(url, model, streams, keeps=True)


def _block_history() -> list[Any]:
    broken = {"type": "tool_use", "id": "toolu_0", "name": "look_up", "input": BROKEN}
    refused = {"type": "tool_result", "tool_use_id": "toolu_0", "content": REFUSED}
    return [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": [broken]},
        {"role": "user", "content": [refused | {"is_error": True}]},
        {"role": "assistant", "content": AGAIN},
        {"role": "user", "content": LATER},
    ]


def anthropic_messages(url: str, model: str, streams: bool) -> Seen:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages
    tool = {"name": "look_up", "description": DESCRIPTION, "input_schema": PARAMETERS}

    def send(messages: list[Any]) -> Any:
        options = {"model": model, "max_tokens": 500, "system": SYSTEM, "tools": [tool]}
        if not streams:
            return client.create(**options, messages=messages)
        with client.stream(**options, messages=messages) as stream:
            for _ in stream:
                pass
            return stream.get_final_message()

    seen, messages = Seen(), _block_history()
    for question in (None, ANIMALS):
        if question is not None:
            messages.append({"role": "user", "content": question})
        reply = send(messages)
        while reply.stop_reason == "tool_use":
            messages.append({"role": "assistant", "content": reply.content})
            results = []
            for block in reply.content:
                if block.type == "thinking":
                    seen.reasoning += block.thinking
                if block.type == "tool_use":
                    seen.calls.append((block.name, block.input))
                    results.append(_block_result(block.id, block.input["word"]))
            messages.append({"role": "user", "content": results})
            reply = send(messages)
        assert reply.stop_reason == "end_turn"
        seen.texts.append("".join(block.text for block in reply.content if block.type == "text"))
        messages.append({"role": "assistant", "content": reply.content})
    return seen


def _block_result(call: str, word: str) -> dict[str, Any]:
    content: Any = WORDS[word]
    if word == "owl":
        source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
        content = [{"type": "text", "text": content}, {"type": "image", "source": source}]
    return {"type": "tool_result", "tool_use_id": call, "content": content}


def _litellm(url: str, model: str, streams: bool, broken: str) -> Seen:
    litellm = pytest.importorskip("litellm")

    def send(messages: list[Any]) -> Any:
        options = {"model": model, "messages": messages, "tools": [_chat_tool()]}
        options |= {"api_base": url, "api_key": "none", "num_retries": 0, "max_tokens": 500}
        if not streams:
            return litellm.completion(**options).choices[0].message
        chunks = list(litellm.completion(**options, stream=True))
        return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message

    seen = Seen()
    _chat(seen, send, _chat_history(broken), lambda reply: reply.model_dump())
    return seen


def litellm_as_openai(url: str, model: str, streams: bool) -> Seen:
    return _litellm(f"{url}/v1", f"openai/{model}", streams, BROKEN)


def litellm_as_anthropic(url: str, model: str, streams: bool) -> Seen:
    # it refuses arguments that are no JSON by itself
    return _litellm(url, f"anthropic/{model}", streams, "")


def _langchain(url: str, model: str, streams: bool, **more: Any) -> Seen:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core import messages as say

    chat = langchain.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, max_retries=0, **more
    ).bind_tools([_chat_tool()])
    broken = say.InvalidToolCall(
        type="invalid_tool_call", id="call_0", name="look_up", args=BROKEN, error="no JSON"
    )
    messages: list[Any] = [
        say.SystemMessage(SYSTEM),
        say.HumanMessage(FIRST),
        say.AIMessage("", invalid_tool_calls=[broken]),
        say.ToolMessage(REFUSED, tool_call_id="call_0"),
        say.AIMessage(AGAIN),
        say.HumanMessage(LATER),
    ]

    def send() -> Any:
        if not streams:
            return chat.invoke(messages)
        whole: Any = None
        for chunk in chat.stream(messages):
            whole = chunk if whole is None else whole + chunk
        return whole

    seen = Seen()
    for question in (None, ANIMALS):
        if question is not None:
            messages.append(say.HumanMessage(question))
        reply = send()
        while reply.tool_calls:
            messages.append(reply)
            for block in reply.content if isinstance(reply.content, list) else ():
                if block["type"] == "reasoning":
                    seen.reasoning += "".join(part["text"] for part in block["content"])
            for call in reply.tool_calls:
                seen.calls.append((call["name"], call["args"]))
                result = _chat_result(call["id"], call["args"]["word"])["content"]
                messages.append(say.ToolMessage(result, tool_call_id=call["id"]))
            reply = send()
        seen.texts.append(reply.text)
        messages.append(reply)
    return seen


def langchain_chat(url: str, model: str, streams: bool) -> Seen:
    return _langchain(url, model, streams)


def langchain_responses(url: str, model: str, streams: bool) -> Seen:
    return _langchain(url, model, streams, use_responses_api=True, output_version="responses/v1")


def _agents(url: str, model: str, streams: bool, kind: str) -> Seen:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    seen = Seen()

    async def look_up(context: Any, arguments: str) -> Any:
        given = json.loads(arguments)
        seen.calls.append(("look_up", given))
        text = agents.ToolOutputText(text=WORDS[given["word"]])
        if given["word"] == "owl":
            return [text, agents.ToolOutputImage(image_url=DATA_URL)]
        return text.text

    async def hold() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        tool = agents.FunctionTool(
            name="look_up",
            description=DESCRIPTION,
            params_json_schema=PARAMETERS,
            on_invoke_tool=look_up,
        )
        agent = agents.Agent(
            name="a",
            instructions=SYSTEM,
            model=getattr(agents, kind)(model=model, openai_client=client),
            tools=[tool],
        )
        items: list[Any] = _items()
        for question in (None, ANIMALS):
            if question is not None:
                items.append({"role": "user", "content": question})
            if streams:
                result = agents.Runner.run_streamed(agent, items)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, items)
            for item in result.new_items:
                if item.type == "reasoning_item" and question is None:
                    parts = item.raw_item.content or item.raw_item.summary
                    seen.reasoning += "".join(part.text for part in parts)
            seen.texts.append(result.final_output)
            items = result.to_input_list()
        await client.close()

    asyncio.run(hold())
    return seen


def agents_chat(url: str, model: str, streams: bool) -> Seen:
    return _agents(url, model, streams, "OpenAIChatCompletionsModel")


def agents_responses(url: str, model: str, streams: bool) -> Seen:
    return _agents(url, model, streams, "OpenAIResponsesModel")


CLIENTS: list[Callable[[str, str, bool], Seen]] = [
    openai_chat,
    openai_responses,
    openai_stored_responses,
    anthropic_messages,
    litellm_as_openai,
    litellm_as_anthropic,
    langchain_chat,
    langchain_responses,
    agents_chat,
    agents_responses,
]
SILENT = {(langchain_chat, False), (langchain_chat, True), (langchain_responses, True)}
"""Clients that show no reasoning of such a server, whole or as a stream."""
CHANGE = {
    litellm_as_openai: "not instructions]\n[A picture was left out",
    litellm_as_anthropic: "A picture was left out",
    agents_chat: WORDS["owl"],
}
"""Clients that send the conversation otherwise, each with words that come in it after the first result.

litellm tells a picture as the user's, or leaves out a broken call's arguments; the Agents SDK leaves
pictures out of chats.
"""


def _broken(model: str, arguments: str) -> str:
    """The broken call in the format of a model."""
    if model == "qwen35":
        return f"<function=look_up>\n{arguments}"
    key = "parameters" if model == "llama3" else "arguments"
    return f'"name": "look_up", "{key}": {arguments}'


@pytest.fixture(scope="module")
def expected(server: Server) -> Callable[[str], str]:
    """The last prompt of a model by OpenAI's client."""
    prompts: dict[str, str] = {}

    def find(model: str) -> str:
        if model not in prompts:
            openai_chat(server.url, model, False)
            prompts[model] = without_ids(server.prompts()[-1][1])
        return prompts[model]

    return find


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_conversation(
    client: Callable[[str, str, bool], Seen],
    model: str,
    streams: bool,
    server: Server,
    expected: Callable[[str], str],
) -> None:
    want = expected(model)
    seen = client(server.url, model, streams)
    assert seen.calls == CALLS
    assert seen.texts == [FOX_ANSWER, OWL_ANSWER]
    reasons = MODELS[model].opens is not None and (client, streams) not in SILENT
    assert seen.reasoning == (REASONING if reasons else "")
    name, prompt = server.prompts()[-1]
    assert name == model
    broken = _broken(model, "{}" if client is litellm_as_anthropic else BROKEN)
    broken = broken.removesuffix("{}") if model == "qwen35" else broken
    reported = CHANGE.get(client, "A picture was left out")
    rest = prompt
    for text in (broken, REFUSED, AGAIN, LATER, WORDS["fox"], reported, FOX_ANSWER, ANIMALS):
        _, found, rest = rest.partition(text)
        assert found, text
    if client not in CHANGE:
        assert without_ids(prompt) == want
