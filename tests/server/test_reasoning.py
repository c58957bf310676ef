"""Reasoning in every dialect: told from the answer, given back, switched off, and ended by a budget."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.generation.answers.reasoning import with_reasoning
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.tokenizer.chat import REASONING_KEYS, chat_data
from tests.server.conftest import GOLDENS, events, with_template

pytestmark = pytest.mark.serve

TEMPLATE = (
    "{%- for m in messages %}[{{ m.role }}]"
    "{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
    "{%- if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}"
    "{%- if add_generation_prompt %}[assistant]<think>"
    "{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)
ANSWER = "Foxes are animals.\n</think>\n\nYes, it is."
LENGTH = 29
QUESTION = [{"role": "user", "content": "Is a fox an animal?"}]


@pytest.fixture
def asked(start: Callable[..., Any], tmp_path: Path) -> Iterator[tuple[Any, list[str]]]:
    """A client of a model that thinks and answers as dictated, and the prompts that it read."""
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.stand_in import dictate

    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return ANSWER if prompt.endswith("<think>") else "Yes, it is."

    with (
        start(ServedModel("m", *with_template(tmp_path / "m", TEMPLATE))) as client,
        dictate(reply),
    ):
        yield client, prompts


def asked_for(client: Any, path: str, **body: Any) -> Any:
    response = client.post(path, json={"model": "m", **body})
    assert response.status_code == 200, response.text
    return response


def reasoning_tokens() -> int:
    """How many tokens the dictated reasoning has, its closing tag included."""
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    return next(n for n in range(len(ids)) if "</think>" in tokenizer.decode(ids[:n]))


def test_chat(asked: tuple[Any, list[str]]) -> None:
    client, prompts = asked
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": LENGTH}
    answer = asked_for(client, "/v1/chat/completions", **body).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (
        "Foxes are animals.",
        "Yes, it is.",
    )
    details = {"reasoning_tokens": reasoning_tokens()}
    assert answer["usage"]["completion_tokens_details"] == details
    usage = {"include_usage": True}
    streamed = asked_for(client, "/v1/chat/completions", stream=True, stream_options=usage, **body)
    chunks = events(streamed.text)
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    # given back, under any name
    for name in ("reasoning_content", "reasoning", "thinking"):
        answer = {"role": "assistant", "content": "Yes.", name: "Hm."}
        asked_for(client, "/v1/chat/completions", messages=[*QUESTION, answer, *QUESTION])
        assert "[assistant](Hm.)Yes." in prompts[-1]


def test_stop_strings_end_the_answer_alone(asked: tuple[Any, list[str]]) -> None:
    client, _ = asked
    want = ("Foxes are animals.", "Yes, ")
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": LENGTH}
    choice = asked_for(client, "/v1/chat/completions", stop=["it", "are"], **body).json()[
        "choices"
    ][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == want
    assert choice["finish_reason"] == "stop"
    answer = asked_for(client, "/v1/messages", stop_sequences=["it", "are", "\n"], **body).json()
    assert tuple(block[block["type"]] for block in answer["content"]) == want
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "it")


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_reasoning_is_switched_off(asked: tuple[Any, list[str]], fields: dict[str, Any]) -> None:
    client, prompts = asked
    body = {"messages": QUESTION, "max_tokens": len("Yes, it is."), **fields}
    message = asked_for(client, "/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert prompts[-1].endswith("<think></think>")
    assert "reasoning_content" not in message and message["content"].startswith("Yes, it is.")


def test_efforts_reach_the_template(asked: tuple[Any, list[str]]) -> None:
    client, prompts = asked
    asked_for(client, "/v1/chat/completions", messages=QUESTION, reasoning_effort="low")
    asked_for(client, "/v1/responses", input=QUESTION, reasoning={"effort": "high"})
    output = {"effort": "medium"}
    asked_for(client, "/v1/messages", messages=QUESTION, max_tokens=9, output_config=output)
    for prompt, effort in zip(prompts, ("low", "high", "medium"), strict=True):
        assert f"[effort {effort}]" in prompt


def test_messages_have_thinking_blocks(asked: tuple[Any, list[str]]) -> None:
    client, _ = asked
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": LENGTH}
    first, second = asked_for(client, "/v1/messages", **body).json()["content"]
    assert (first["type"], first["thinking"]) == ("thinking", "Foxes are animals.")
    assert second == {"type": "text", "text": "Yes, it is."}


def test_responses_have_reasoning_items(asked: tuple[Any, list[str]]) -> None:
    client, _ = asked
    answer = asked_for(client, "/v1/responses", input=QUESTION, max_output_tokens=LENGTH).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert "Foxes are animals." in json.dumps(answer["output"][0])
    details = {"reasoning_tokens": reasoning_tokens()}
    assert answer["usage"]["output_tokens_details"] == details
    assert answer["output"][1]["content"][0]["text"] == "Yes, it is."


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"reasoning_budget": 3}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 3}}),
        ("/v1/chat/completions", {}),
    ],
)
def test_a_budget_ends_reasoning(
    start: Callable[..., Any], tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    from mlx_mmfree.server.settings import ServedModel

    served = ServedModel("m", *with_template(tmp_path / "m", TEMPLATE))
    with start(served, reasoning_budget=None if fields else 3) as client:
        body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, **fields}
        answer = asked_for(client, path, **body).json()
    tokenizer = served.tokenizer
    if path == "/v1/messages":
        reasoning_text = answer["content"][0]["thinking"]
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    else:
        message = answer["choices"][0]["message"]
        reasoning_text = message["reasoning_content"]
        assert message["content"]
    assert len(tokenizer.encode(reasoning_text, add_special_tokens=False)) <= 3 + 2


@pytest.mark.parametrize(
    ("begun", "ends", "reasoning_text", "content"),
    [
        ({"reasoning_content": "Foxes are"}, "<think>Foxes are", " animals.", "Yes, it is."),
        (
            {"reasoning_content": "Foxes are animals.", "content": "Yes,"},
            "<think>Foxes are animals.\n</think>\n\nYes,",
            None,
            " it is.",
        ),
        ({"content": "Yes,"}, "<think>\n</think>\n\nYes,", None, " it is."),
    ],
)
def test_an_answer_that_has_begun_goes_on(
    start: Callable[..., Any],
    tmp_path: Path,
    begun: dict[str, str],
    ends: str,
    reasoning_text: str | None,
    content: str,
) -> None:
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.stand_in import dictate

    prompts: list[str] = []
    rest = content if reasoning_text is None else f"{reasoning_text}\n</think>\n\n{content}"

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return rest

    messages = [*QUESTION, {"role": "assistant", "content": "", **begun}]
    with (
        start(ServedModel("m", *with_template(tmp_path / "m", TEMPLATE))) as client,
        dictate(reply),
    ):
        body = {"messages": messages, "continue_final_message": True, "max_tokens": len(rest)}
        answer = asked_for(client, "/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert prompts[0].endswith(f"[assistant]{ends}")
    assert (answer.get("reasoning_content"), answer["content"][: len(content)]) == (
        reasoning_text,
        content,
    )


def test_what_only_begins_like_reasoning_is_none() -> None:
    from mlx_mmfree.generation.answers.answer_parts import TextReader
    from mlx_mmfree.generation.answers.reasoning import ReasoningReader, ReasoningTags
    from mlx_mmfree.generation.scheduling import Event
    from mlx_mmfree.server.answers import TextParts

    parts = TextParts(
        ReasoningReader(TextReader(), ReasoningTags("<think>", "</think>"), is_open=False)
    )
    steps: tuple[tuple[str, Any], ...] = (("<", None), ("thin", "length"))
    parts.add([Event(0, text, 1, None, reason, 3, 0) for text, reason in steps])
    assert parts.reasoning_tokens == 0


@pytest.mark.parametrize("keys", list(itertools.permutations(REASONING_KEYS, 2)))
def test_all_readers_find_the_same_reasoning(keys: tuple[str, str]) -> None:
    from mlx_mmfree.server.schemas import Message

    given = dict(zip(keys, "ab", strict=True))
    message: Any = {"role": "assistant", "content": "Yes.", **given}
    first = next(given[key] for key in REASONING_KEYS if key in given)
    assert Message(**message).reasoning_text == first
    assert with_reasoning(message, "{{ m.reasoning }}")["reasoning"] == first
    assert chat_data([message], False, {})["messages"][0]["reasoning_content"] == first
