"""Calls, texts and reasoning of every format of calls in every interface, streamed and whole."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_mmfree.generation.answers.reasoning import AnswerEnd, ReasoningTags
from mlx_mmfree.generation.scheduling import Event
from mlx_mmfree.server.answers import Answer, ChatAnswer
from mlx_mmfree.server.bodies.messages import MessagesRequest
from mlx_mmfree.server.bodies.responses import ResponsesRequest
from mlx_mmfree.server.chat import reader_of
from mlx_mmfree.server.messages import MessagesAnswer
from mlx_mmfree.server.responses import ResponsesAnswer
from mlx_mmfree.server.schemas import ChatRequest
from mlx_mmfree.server.texts import Prompt
from mlx_mmfree.server.tool_calls.call_formats import CallFormat, call_format
from tests.fuzz.dialects import KEYED, answer_text, written
from tests.server.test_tools import CALLS

pytestmark = pytest.mark.serve

CHAT, MESSAGES, RESPONSES = PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
FORMATS = {reader.__name__: template for reader, template in CALLS.items()}
FORMATS["MistralList"] = (
    '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]'
)
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 5}, "count": {"type": "integer"}},
    "required": ["word"],
    "additionalProperties": False,
}


@dataclass
class Reply:
    """An answer in no interface's own format.

    Attributes:
        reasoning, text: What it holds.
        calls: The whole calls.
        reason: How it ended: "stop", "length" or "calls".
        stop: The stop string that is reported.
        open: In a stream, the names of the calls that were never closed.
    """

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str | None = None
    stop: str | None = None
    open: list[str] = field(default_factory=list)


REASONS = {
    **{"stop": "stop", "length": "length", "tool_calls": "calls"},
    **{"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "calls"},
}


def whole(path: str, body: dict[str, Any]) -> Reply:
    """An answer that came as a whole."""
    reply = Reply()
    if path == CHAT:
        choice = body["choices"][0]
        message = choice["message"]
        reply.reasoning = message.get("reasoning_content") or ""
        reply.text = message["content"] or ""
        for call in message.get("tool_calls", []):
            function = call["function"]
            reply.calls.append((function["name"], json.loads(function["arguments"])))
        reply.reason = REASONS[choice["finish_reason"]]
        return reply
    for block in body["content" if path == MESSAGES else "output"]:
        if block["type"] == "tool_use":
            reply.calls.append((block["name"], block["input"]))
        elif block["type"] == "function_call":
            assert block["status"] in ("completed", "incomplete")
            if block["status"] == "completed":
                reply.calls.append((block["name"], json.loads(block["arguments"])))
        elif path == MESSAGES:
            reply.text += block.get("text", "")
            reply.reasoning += block.get("thinking", "")
        else:
            text = "".join(part["text"] for part in block["content"])
            reply.reasoning += text if block["type"] == "reasoning" else ""
            reply.text += text if block["type"] == "message" else ""
    if path == MESSAGES:
        reply.reason, reply.stop = REASONS[body["stop_reason"]], body["stop_sequence"]
    else:
        is_cut = body["status"] == "incomplete"
        reply.reason = "length" if is_cut else "calls" if reply.calls else "stop"
    return reply


def streamed(path: str, events: list[dict[str, Any]]) -> Reply:
    """An answer that came as a stream, put together from its events alone."""
    reply = Reply()
    if path == CHAT:
        calls: dict[int, list[str]] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            reply.reasoning += choice["delta"].get("reasoning_content") or ""
            reply.text += choice["delta"].get("content") or ""
            for chunk in choice["delta"].get("tool_calls", []):
                calls.setdefault(chunk["index"], ["", ""])
                calls[chunk["index"]][0] += chunk["function"].get("name", "")
                calls[chunk["index"]][1] += chunk["function"]["arguments"]
            reply.reason = REASONS.get(choice["finish_reason"], reply.reason)
        for name, arguments in calls.values():
            try:
                reply.calls.append((name, json.loads(arguments)))
            except ValueError:
                reply.open.append(name)
        if reply.reason != "calls":
            # nothing closes a call here
            reply.open = [*(name for name, _ in reply.calls), *reply.open]
            reply.calls = []
        return reply
    if path == MESSAGES:
        blocks: dict[int, dict[str, Any]] = {}
        for event in events:
            match event["type"].removeprefix("content_block_"):
                case "start":
                    blocks[event["index"]] = {**event["content_block"], "json": ""}
                    assert not blocks[event["index"]].get("text") and not event[
                        "content_block"
                    ].get("input")
                case "delta":
                    block, delta = blocks[event["index"]], event["delta"]
                    block["json"] += delta.get("partial_json", "")
                    for name in ("text", "thinking"):
                        if name in delta:
                            block[name] += delta[name]
                case "stop":
                    blocks[event["index"]]["is_closed"] = True
                case "message_delta":
                    reply.reason = REASONS[event["delta"]["stop_reason"]]
                    reply.stop = event["delta"]["stop_sequence"]
        for block in blocks.values():
            reply.text += block.get("text", "")
            reply.reasoning += block.get("thinking", "")
            if block["type"] != "tool_use":
                assert block["is_closed"]
            elif "is_closed" in block:
                reply.calls.append((block["name"], json.loads(block["json"])))
            else:
                reply.open.append(block["name"])
        return reply
    items: dict[str, dict[str, Any]] = {}
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                item = event["item"]
                assert item["status"] == "in_progress"
                assert not item.get("content") and not item.get("arguments"), item
                items[item["id"]] = {**item, "text": "", "done": False}
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                items[event["item_id"]]["text"] += event["delta"]
            case "function_call_arguments.done":
                assert items[event["item_id"]]["text"] == event["arguments"]
            case "output_text.done" | "reasoning_text.done":
                assert items[event["item_id"]]["text"] == event["text"]
            case "output_item.done":
                items[event["item"]["id"]]["done"] = True
                assert event["item"]["status"] == "completed"
    end = events[-1]["response"]
    reply = whole(path, end)
    assert [item["id"] for item in end["output"]] == list(items)
    for item in end["output"]:
        was_done = items[item["id"]]["done"]
        assert was_done == (item["status"] == "completed"), item
        if not was_done:
            reply.open.append(item["name"])
    return reply


def format_of(name: str) -> CallFormat:
    format = call_format("{{ tools }}" + FORMATS[name])
    assert format is not None
    return format


TAGS = ReasoningTags("<think>", "</think>")
FUNCTIONS: dict[str, Any] = {"look_up": SCHEMA, "draw": {"type": "object", "properties": {}}}


def ask(
    format: str,
    path: str,
    text: str,
    is_stream: bool = False,
    *,
    thinks: str = "",
    cut: int | None = None,
    stop: str | None = None,
    one: bool = False,
    strict: bool = False,
) -> Reply:
    """An answer that a model of a format writes in random chunks, in an interface.

    Args:
        format: The format.
        path: The interface.
        text: What the model writes.
        is_stream: Whether the answer streams.
        thinks: `"thinks"` where the prompt opens the reasoning, `"may"` where the model may.
        cut: After how many characters `max_tokens` cuts the answer.
        stop: A stop string.
        one: Whether there is one call at most.
        strict: Whether calls follow their schema.
    """
    messages = [{"role": "user", "content": "What?"}]
    functions = [{"name": n, "parameters": s, "strict": strict} for n, s in FUNCTIONS.items()]
    chat = ChatRequest.model_validate(
        {
            "messages": messages,
            "tools": [{"type": "function", "function": each} for each in functions],
            "parallel_tool_calls": not one,
            "stop": [] if stop is None else [stop],
        }
    )
    prompt = Prompt([1], reasoning_tags=TAGS if thinks else None, is_thinking=thinks == "thinks")
    make_reader = partial(reader_of, chat, prompt, format_of(format))
    found: Any = SimpleNamespace(
        make_reader=make_reader,
        texts=[SimpleNamespace(tokens=[1], max_tokens=500)],
        served=SimpleNamespace(name="m"),
    )
    answer: Answer
    if path == CHAT:
        answer = ChatAnswer("m", 1, make_reader, None, chat.stream_options)
    elif path == MESSAGES:
        answer = MessagesAnswer(
            MessagesRequest.model_validate({"messages": messages, "max_tokens": 500}), found
        )
    else:
        body = ResponsesRequest.model_validate({"input": messages, "store": False})
        unused: Any = None
        answer = ResponsesAnswer(body, found, unused)
    sent = answer.opening()
    for event in events_of(text[:cut], AnswerEnd(chat.stop, make_reader(), one), cut is not None):
        sent += answer.add([(0, event)])
        # what is sent is a value, which nothing changes later
        sent = json.loads(json.dumps(sent)) if random.random() < 0.1 else sent
    if not is_stream:
        return whole(path, answer.whole())
    return streamed(path, [*sent, *answer.closing()])


def events_of(text: str, end: AnswerEnd, is_cut: bool) -> Iterator[Event]:
    """The steps in which a text is written, in random chunks, up to where it ends."""
    rng = random.Random(text)
    while True:
        size = rng.choice((1, 2, 5, 40))
        chunk, text = text[:size], text[size:]
        shown = end.add(chunk)
        reason: Any = "stop" if end.is_met else None
        if not text and not reason:
            reason = "length" if is_cut else "stop"
            shown += end.finalize()
        yield Event(0, shown, 1, None, reason, 1, 0, stop_string=end.met)
        if reason:
            return


FOX = ("look_up", {"word": "fox", "count": 2})
OWL = ("look_up", {"word": "owl"})
EVERYWHERE = [(path, is_stream) for path in PATHS for is_stream in (False, True)]


@pytest.mark.parametrize("format", FORMATS)
def test_calls_come_whole(format: str) -> None:
    before = "" if format == "BareCalls" else "I see.\n"
    text = before + written(format, FOX, OWL)
    for path, is_stream in EVERYWHERE:
        assert ask(format, path, text, is_stream) == Reply(
            text=before, calls=[FOX, OWL], reason="calls"
        )
        one = ask(format, path, text, is_stream, one=True)
        assert one == Reply(text=before, calls=[FOX], reason="calls")
        reply = ask(format, path, "Just a text.", is_stream)
        assert reply == Reply(text="Just a text.", reason="stop")


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_that_breaks_off_is_none(format: str) -> None:
    text = written(format, ("look_up", {"word": "a fox END"}))
    end = text.index(" END")
    for path, is_stream in EVERYWHERE:
        ways: list[tuple[str, dict[str, Any], Reply]] = [
            (text[:end], {}, Reply(reason="stop")),
            (text, {"cut": end}, Reply(reason="length")),
        ]
        if path != RESPONSES:
            stop = "END" if path == MESSAGES else None
            ways.append((text, {"stop": "END"}, Reply(reason="stop", stop=stop)))
        for reply, options, want in ways:
            if is_stream:
                want.open = ["look_up"]
            assert ask(format, path, reply, is_stream, **options) == want, (
                path,
                is_stream,
                options,
            )


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_call_counts_however_the_answer_ends(format: str) -> None:
    text = written(format, FOX, ("look_up", {"word": "an owl END"}))
    end = text.index(" END")
    for path, is_stream in EVERYWHERE:
        want = Reply(calls=[FOX], reason="calls", open=["look_up"] if is_stream else [])
        assert ask(format, path, text[:end], is_stream) == want
        if path != RESPONSES:
            assert ask(format, path, text, is_stream, stop="END") == want
            assert ask(format, path, text, is_stream, cut=end) == want
        else:
            want.reason = "length"
            assert ask(format, path, text, is_stream, cut=end) == want


@pytest.mark.parametrize("format", FORMATS)
def test_no_cut_leaves_markup(format: str) -> None:
    text = written(format, OWL)
    first = len(
        {"MistralCalls": "[TOOL_CALLS]", "MistralList": "[TOOL_CALLS]", "BareCalls": "{"}.get(
            format, "<function=" if format == "TaggedCalls" else "<tool_call>"
        )
    )
    for end in range(first, len(text)):
        for path, is_stream in EVERYWHERE:
            reply = ask(format, path, text, is_stream, cut=end)
            assert reply.text == "", text[:end]
            if path != RESPONSES:
                assert reply.reason == ("calls" if reply.calls else "length"), text[:end]
            assert reply.calls in ([], [OWL])


@pytest.mark.parametrize("thinks", ["thinks", "may"])
@pytest.mark.parametrize("format", FORMATS)
def test_calls_at_the_end_of_open_reasoning(format: str, thinks: str) -> None:
    begin = "<think>" if thinks == "may" else ""
    calls = written(format, FOX, OWL)
    other = written(format, ("other", {}))
    for path, is_stream in EVERYWHERE:
        say = partial(ask, format, path, is_stream=is_stream, thinks=thinks)
        reply = say(f"{begin}I should look.\n{calls}\n")
        assert reply == Reply("I should look.", calls=[FOX, OWL], reason="calls")
        reply = say(f"{begin}Hm.\n{calls}", one=True)
        assert reply == Reply("Hm.", calls=[FOX], reason="calls")
        for text in (
            f"Like {calls}, or not",
            f"Like {other}",
            "Like <tool_call> or { or [TOOL_CALLS].",
        ):
            assert say(begin + text) == Reply(text, reason="stop")
        reply = say(f"{begin}Like {calls} no.\n{calls}")
        assert reply == Reply(f"Like {calls} no.", calls=[FOX, OWL], reason="calls")
        answer = "" if format == "BareCalls" else "So:\n"
        reply = say(f"{begin}Like {calls}</think>\n\n{answer}{calls}")
        assert reply == Reply(f"Like {calls}", answer, [FOX, OWL], "calls")
        reply = say(f"{begin}Look.\n{written(format, OWL)[:-25]}")
        assert reply == Reply("Look.", reason="stop")


@pytest.mark.parametrize("thinks", ["thinks", "may"])
def test_stop_strings_end_the_answer_alone(thinks: str) -> None:
    begin = "" if thinks == "thinks" else "<think>\n"
    reasoning = "Write END of it.\nSo."
    for stop in ("END", "\n", "D o", "</think>", "think>\n\nA"):
        text = f"{begin}{reasoning}\n</think>\n\nA text"
        for path, is_stream in EVERYWHERE[:4]:
            say = partial(ask, "XMLCalls", path, is_stream=is_stream, thinks=thinks, stop=stop)
            assert say(text) == Reply(reasoning, "A text", reason="stop")
            reported = stop if path == MESSAGES else None
            want = Reply(reasoning, "A text", reason="stop", stop=reported)
            assert say(f"{text}{stop} more") == want


@pytest.mark.parametrize("format", KEYED)
def test_a_strict_call_that_fails_is_text(format: str) -> None:
    long = written(format, ("look_up", {"word": "elephant"}))
    for path, is_stream in EVERYWHERE:
        reply = ask(format, path, f"So:\n{long}", is_stream, strict=True)
        assert reply == Reply(text=f"So:\n{long}", reason="stop")
        reply = ask(format, path, written(format, FOX, OWL), is_stream, strict=True)
        assert reply == Reply(calls=[FOX, OWL], reason="calls")
        reply = ask(format, path, f"Hm.\n{long}", is_stream, strict=True, thinks="thinks")
        assert reply == Reply(f"Hm.\n{long}", reason="stop")


@pytest.mark.parametrize("format", FORMATS)
def test_streams_equal_wholes(format: str) -> None:
    rng = random.Random(format)
    for number in range(60):
        text = answer_text(format, rng)
        options: dict[str, Any] = {"thinks": ("", "may", "thinks")[number % 3]}
        options |= {"one": rng.random() < 0.2, "strict": rng.random() < 0.2}
        options |= {"cut": rng.randint(1, len(text))} if rng.random() < 0.5 else {}
        for path in PATHS:
            stop = "fox" if path != RESPONSES and rng.random() < 0.2 else None
            come = ask(format, path, text, **options, stop=stop)
            sent = ask(format, path, text, True, **options, stop=stop)
            assert (sent.reasoning, sent.text, sent.reason, sent.stop) == (
                come.reasoning,
                come.text,
                come.reason,
                come.stop,
            ), (path, text, options)
            # a chat does not tell whether the last call is closed
            assert sent.calls[: len(come.calls)] == come.calls, (path, text, options)
            assert path == CHAT or sent.calls == come.calls
            assert len(come.calls) <= 1 or not options["one"]
