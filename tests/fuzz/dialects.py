"""Random conversations in the three dialects of the server, each after the grammar of its interface."""

import json
import random
from typing import Any

CHAT, MESSAGES, COUNT, RESPONSES = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
)
PATHS = (CHAT, MESSAGES, COUNT, RESPONSES)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "[a-z]{2,9}"}, "b": {"enum": [1, "x"]}},
    "required": ["a"],
}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
_WORDS = ("fox", "hen", "wood", "river", "<think>", "</think>", "<tool_call>", "{", "\u00e4", "\n")


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.choice((1, 2, 9))))


def _maybe(rng: random.Random, chance: float = 0.3, **values: Any) -> dict[str, Any]:
    """Some of the values."""
    return {name: value for name, value in values.items() if rng.random() < chance}


def _turns(rng: random.Random) -> list[tuple[str, Any]]:
    """Messages, reasoning, calls and results, the user's words first and last."""
    turns: list[tuple[str, Any]] = [("user", _text(rng))]
    for number in range(rng.choice((0, 0, 1, 3))):
        turns += [("reasoning_text", _text(rng))] if rng.random() < 0.3 else []
        turns += [("said", _text(rng))] if rng.random() < 0.7 else []
        if rng.random() < 0.5:
            names = [f"call_{number}_{n}" for n in range(rng.choice((1, 1, 2)))]
            turns += [("call", (name, _arguments(rng))) for name in names]
            rng.shuffle(names)
            turns += [("result", (name, _text(rng))) for name in names]
        turns.append(("user", _text(rng)))
    if rng.random() < 0.2:
        # roles in any order
        rng.shuffle(turns)
        turns.append(("user", _text(rng)))
    return turns


def _arguments(rng: random.Random) -> Any:
    """The arguments of a call as they come back: an object, its text, nothing, or broken."""
    sound = {"a": _text(rng)}
    return rng.choice(
        (sound, json.dumps(sound), "", None, json.dumps(sound)[:-3], "[]", _text(rng))
    )


def _result(rng: random.Random, text: str, kind: str, picture: dict[str, Any]) -> Any:
    """The result of a tool as a text or as parts, which may hold a picture."""
    parts = [{"type": kind, "text": text}, picture]
    rng.shuffle(parts)
    return rng.choice((text, text, [{"type": kind, "text": text}], parts))


def _chat(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(("system", "developer")), "content": _text(rng)})
    for kind, value in _turns(rng):
        match kind, value:
            case "user", text:
                parts = [{"type": "text", "text": text}]
                messages.append({"role": "user", "content": rng.choice((text, parts))})
            case "reasoning_text", text:
                added = _maybe(rng, 0.2, refusal="", reasoning_details=[], cache_control={})
                reasoning_text = {"role": "assistant", "content": None, "reasoning_content": text}
                messages.append(reasoning_text | added)
            case "said", text:
                messages.append({"role": "assistant", "content": text})
            case "call", (name, arguments):
                function = {"name": "f", "arguments": arguments}
                call = {"id": name, "type": "function", "function": function}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "result", (name, text):
                picture = {"type": "image_url", "image_url": {"url": PICTURE}}
                content = _result(rng, text, "text", picture)
                messages.append({"role": "tool", "tool_call_id": name, "content": content})
    function = {"name": "f", "description": "does", "parameters": SCHEMA}
    function |= _maybe(rng, strict=True)
    named = {"type": "function", "function": {"name": "f"}}
    return {
        "messages": messages,
        **_maybe(
            rng,
            n=2,
            seed=3,
            stop=["a", "\n"],
            top_k=5,
            min_p=0.1,
            logprobs=True,
            top_logprobs=2,
            logit_bias={"5": -3.5, "517": 1},
            frequency_penalty=0.1,
            presence_penalty=-0.1,
            repetition_penalty=1.2,
            xtc_probability=0.5,
            xtc_threshold=0.1,
            stream_options={"include_usage": True},
            user="me",
            tools=[{"type": "function", "function": function}],
            tool_choice=rng.choice(("auto", "none", "required", named)),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            },
            chat_template_kwargs={"enable_thinking": False},
        ),
    }


def _messages(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []

    def add(role: str, block: dict[str, Any]) -> None:
        block |= _maybe(rng, 0.1, cache_control={"type": "ephemeral"})
        if messages and messages[-1]["role"] == role and rng.random() < 0.8:
            messages[-1]["content"].append(block)
        else:
            messages.append({"role": role, "content": [block]})

    for kind, value in _turns(rng):
        match kind, value:
            case "user", text:
                add("user", {"type": "text", "text": text})
            case "reasoning_text", text:
                add("assistant", {"type": "thinking", "thinking": text, "signature": ""})
            case "said", text:
                add("assistant", {"type": "text", "text": text})
            case "call", (name, arguments):
                add("assistant", {"type": "tool_use", "id": name, "name": "f", "input": arguments})
            case "result", (name, text):
                source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
                content = _result(rng, text, "text", {"type": "image", "source": source})
                add("user", {"type": "tool_result", "tool_use_id": name, "content": content})
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": _text(rng)})
    choices = ({"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "f"})
    return {
        "messages": messages,
        **_maybe(
            rng,
            system=rng.choice((_text(rng), [{"type": "text", "text": _text(rng)}])),
            tools=[
                {"name": "f", "description": "does", "input_schema": SCHEMA}
                | _maybe(rng, strict=True)
            ],
            tool_choice=rng.choice(choices) | _maybe(rng, disable_parallel_tool_use=True),
            thinking=rng.choice(({"type": "enabled", "budget_tokens": 8}, {"type": "adaptive"})),
            output_config=_maybe(
                rng, effort="low", format={"type": "json_schema", "schema": SCHEMA}
            ),
            metadata={"user_id": "me"},
            context_management={"edits": []},
        ),
    }


def _responses(rng: random.Random, stored: list[str]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    is_custom: dict[str, bool] = {}
    for kind, value in _turns(rng):
        match kind, value:
            case "user", text:
                parts = [{"type": "input_text", "text": text}]
                items.append({"role": "user", "content": rng.choice((text, parts))})
            case "reasoning_text", text:
                content = [{"type": "reasoning_text", "text": text}]
                items.append({"type": "reasoning", "id": "rs", "summary": [], "content": content})
            case "said", text:
                content = [{"type": "output_text", "text": text, "annotations": []}]
                message = {"type": "message", "role": "assistant", "content": content}
                items.append(message | _maybe(rng, id="msg", status="completed"))
            case "call", (name, arguments):
                is_custom[name] = rng.random() < 0.3 and isinstance(arguments, str)
                given: dict[str, Any] = {"type": "function_call", "arguments": arguments}
                if is_custom[name]:
                    given = {"type": "custom_tool_call", "input": arguments}
                own = {"call_id": name, "name": "f"} | _maybe(rng, 0.2, namespace="mcp__n")
                items.append(given | own)
            case "result", (name, text):
                picture = {"type": "input_image", "image_url": PICTURE}
                kind = "custom_tool_call" if is_custom.get(name) else "function_call"
                output = _result(rng, text, "input_text", picture)
                items.append({"type": f"{kind}_output", "call_id": name, "output": output})
    if stored and rng.random() < 0.1:
        # an item of an earlier response, if it has one of this number
        name = stored[-1].removeprefix("resp_") + rng.choice("0123")
        items.insert(0, {"type": "item_reference", "id": f"msg_{name}"})
    before = rng.choice([*stored[-20:], "resp_" + 24 * "ab"])
    formats = (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "x", "schema": SCHEMA},
    )
    return {
        "input": rng.choice((items, _text(rng))),
        **_maybe(rng, 0.6 if stored else 0.05, previous_response_id=before),
        **_maybe(
            rng,
            instructions=_text(rng),
            store=rng.random() < 0.7,
            tools=[
                {
                    "type": "function",
                    "name": "f",
                    "parameters": SCHEMA,
                    "strict": rng.random() < 0.3,
                },
                {"type": "web_search"},
                {"type": "custom", "name": "g"},
                {"type": "namespace", "name": "mcp__n", "tools": [{"type": "custom", "name": "f"}]},
                *rng.choice(([], [{"type": "shell"}, {"type": "apply_patch"}])),
            ],
            tool_choice=rng.choice(("auto", "none", "required", {"type": "function", "name": "f"})),
            parallel_tool_calls=False,
            reasoning={"effort": "low", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            text={"format": rng.choice(formats), "verbosity": "low"},
            metadata={"a": "b"},
            prompt_cache_key="k",
            client_metadata={"a": "b"},
            truncation="disabled",
        ),
    }


def _fit(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Leaves out what goes with nothing else in the body, in most cases."""
    alone = [] if "tools" in body else ["tool_choice"]
    alone += [] if "logprobs" in body else ["top_logprobs"]
    return {name: value for name, value in body.items() if name not in alone or rng.random() < 0.1}


def draw(path: str, rng: random.Random, stored: list[str]) -> dict[str, Any]:
    """A sound conversation for an address; `stored` are names of responses that it may go on from."""
    if path == CHAT:
        body = _chat(rng)
    elif path == RESPONSES:
        body = _responses(rng, stored)
    else:
        body = _messages(rng)
    body = _fit(body, rng)
    if path == COUNT:
        return body
    if path == MESSAGES:
        body |= _maybe(rng, stop_sequences=["a"], top_k=5)
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body[limit] = rng.choice((1, 4))
    return body | _maybe(rng, 0.5, stream=True, temperature=0.7, top_p=0.9)


KEYED = ("XMLCalls", "GLMCalls")
"""The formats of calls in which each argument has a tag."""


def written(format: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a model of a format writes them."""
    texts = []
    for name, arguments in calls:
        if format in KEYED:
            opening, closing = {
                "XMLCalls": ("<parameter={}>\n", "\n</parameter>\n"),
                "GLMCalls": ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
            }[format]
            values = "".join(f"{opening.format(k)}{v}{closing}" for k, v in arguments.items())
            head = {"XMLCalls": f"\n<function={name}>\n", "GLMCalls": f"{name}\n"}[format]
            last = {"XMLCalls": "</function>\n", "GLMCalls": ""}[format]
            texts.append(f"<tool_call>{head}{values}{last}</tool_call>")
            continue
        given = json.dumps(arguments)
        texts.append(
            {
                "HermesCalls": f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>',
                "BareCalls": f'{{"name": "{name}", "parameters": {given}}}',
                "MistralCalls": f"[TOOL_CALLS]{name}[ARGS]{given}",
                "MistralList": f'{{"name": "{name}", "arguments": {given}}}',
                "TaggedCalls": f"<function={name}>{given}</function>",
            }[format]
        )
    if format == "MistralList":
        return f"[TOOL_CALLS] [{', '.join(texts)}]"
    return {"BareCalls": "; ", "MistralCalls": ""}.get(format, "\n").join(texts)


def answer_text(format: str, rng: random.Random) -> str:
    """An answer of a model of a format: words, reasoning, and calls, some of them broken or cut."""
    parts = []
    for _ in range(rng.choice((1, 2, 4))):
        arguments = {"word": _text(rng), "count": rng.randint(0, 9)}
        call = written(
            format, *rng.choice(([("draw", {})], [("look_up", arguments), ("draw", {})]))
        )
        cut = call[: rng.randint(1, len(call))]
        broken = call.replace('"', rng.choice(("'", '"\n')), 1)
        parts.append(rng.choice((_text(rng), call, call, cut, broken, "<think>", "</think>", "\n")))
    return "".join(parts)


def check_stream(path: str, text: str) -> dict[str, Any] | None:
    """Checks the order of the events of a stream, and returns the error that it ends with, if any.

    Raises:
        AssertionError: It does not follow the grammar of its address.
    """
    *parts, rest = text.split("\n\n")
    assert not rest, f"a cut event: {rest:.300}"
    if path not in (MESSAGES, RESPONSES):
        return _check_chunks(parts)
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}", part
    kinds = [event["type"] for event in events]
    if path == MESSAGES:
        return _check_messages(kinds, events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    end = events[-1]
    assert kinds[-1].removeprefix("response.") == end["response"]["status"], kinds
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    for item in added:
        assert not item.get("content") and not item.get("arguments"), item
    if end["response"]["status"] == "failed":
        error: dict[str, Any] = end["response"]["error"]
        return error
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    output = end["response"]["output"]
    # a call that breaks off is never done
    is_whole = [item["type"] != "function_call" or item["status"] == "completed" for item in output]
    assert done == [item for item, whole in zip(output, is_whole, strict=True) if whole], (
        done,
        end,
    )
    assert [item["id"] for item in added] == [item["id"] for item in output], (added, end)
    return None


def _check_messages(kinds: list[str], events: list[dict[str, Any]]) -> dict[str, Any] | None:
    assert kinds[:2] == ["message_start", "ping"], kinds
    if kinds[-1] == "error":
        error: dict[str, Any] = events[-1]["error"]
        return error
    assert kinds[-2:] == ["message_delta", "message_stop"], kinds
    block, is_open, has_called = "", False, False
    index = -1
    for event in events[2:-2]:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            # a call that breaks off is never closed
            assert not is_open or block == "tool_use", kinds
            index, block = index + 1, event["content_block"]["type"]
        assert event["index"] == index and (is_open or kind == "start"), kinds
        is_open = kind != "stop"
        has_called |= kind == "stop" and block == "tool_use"
    assert not is_open or block == "tool_use", kinds
    assert has_called == (events[-2]["delta"]["stop_reason"] == "tool_use"), events
    return None


def _check_chunks(parts: list[str]) -> dict[str, Any] | None:
    *lines, last = parts
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert not any("error" in chunk for chunk in chunks), f"an error amid the stream: {last:.300}"
    if last == "data: [DONE]":
        return None
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    return error
