"""Chat templates are given messages and tools as in transformers.

The texts are what transformers 5.24.0 renders of the same messages by the same templates.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import UsageError
from mlx_mmfree.tokenizer.chat import MAX_CHARACTERS, ChatTemplate, chat_data
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.test_chat_template import GOLDENS, with_template

EACH = "{% for m in messages %}{{ m.role }}:"
PLAIN = EACH + "{{ m['content'] }};{% endfor %}"
DEFINED = (
    EACH + "{% if m.content is defined %}{{ m.content }}{% else %}nothing{% endif %};{% endfor %}"
)
CALLS = (
    EACH + "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
NAMED = EACH + "{% if m.name is defined %}({{ m.name }}){% endif %}{{ m.content }};{% endfor %}"
STORED = EACH + "{% for k, v in m.items() %}{{ k }}={{ v }},{% endfor %};{% endfor %}"
REASONING_TEXTS = (
    EACH
    + "{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }};{% endfor %}"
)
THINKING = EACH + "{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content }};{% endfor %}"
REASONING = THINKING.replace("thinking", "reasoning")
PARTS = (
    EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "<{{ p.text | trim }}>{% endfor %}{% endif %};{% endfor %}"
)
TOOLS = (
    "{% if tools is none %}none{% endif %}{% for t in tools or [] %}{{ t | tojson }};{% endfor %}"
)

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]


def written(template: str, messages: Any, **variables: Any) -> str:
    data = chat_data(messages, False, variables)
    return ChatTemplate(template, Path("folder")).render(data)


@pytest.mark.parametrize(
    ("template", "answer", "text"),
    [
        (PLAIN, {"content": None}, ":;"),
        (PLAIN, {"content": None, "tool_calls": [CALL]}, ":;"),
        (PLAIN, {"content": ""}, ":;"),
        (PLAIN, {"content": 3}, ":3;"),
        (PLAIN, {}, ":;"),
        (DEFINED, {"content": None}, ":nothing;"),
        (CALLS, {"content": "Yes", "tool_calls": None}, ":Yes;"),
        (CALLS, {"content": None, "tool_calls": [CALL]}, ':f{"a": 1};'),
        (NAMED, {"content": "Yes", "name": None}, ":Yes;"),
        (NAMED, {"content": "Yes", "name": "Bo"}, ":(Bo)Yes;"),
        (
            STORED,
            {"content": "Yes", "reasoning": None, "name": None},
            ":role=assistant,content=Yes,;",
        ),
        (
            STORED,
            {"content": "Yes", "reasoning": "t"},
            ":thinking=t,role=assistant,content=Yes,reasoning=t,reasoning_content=t,;",
        ),
        (
            STORED,
            {"content": "Yes", "reasoning_content": None, "reasoning": "a", "thinking": "b"},
            ":thinking=b,role=assistant,content=Yes,reasoning=a,reasoning_content=b,;",
        ),
        (
            STORED,
            {"content": "Yes", "reasoning_content": "a", "reasoning": "b", "thinking": "c"},
            ":thinking=c,role=assistant,content=Yes,reasoning_content=a,reasoning=b,;",
        ),
        (REASONING_TEXTS, {"content": "Yes", "reasoning": "t"}, ":<think>t</think>Yes;"),
        (REASONING_TEXTS, {"content": "Yes", "thinking": "t"}, ":<think>t</think>Yes;"),
        (REASONING_TEXTS, {"content": "Yes", "reasoning": ""}, ":<think></think>Yes;"),
        (
            REASONING_TEXTS,
            {"content": "Yes", "thinking": "", "reasoning": "t"},
            ":<think>t</think>Yes;",
        ),
        (
            REASONING_TEXTS,
            {"content": "Yes", "thinking": "t", "reasoning": "u"},
            ":<think>t</think>Yes;",
        ),
        (THINKING, {"content": "Yes", "reasoning_content": "t"}, ":[t]Yes;"),
        (THINKING, {"content": "Yes", "reasoning": "t"}, ":[t]Yes;"),
        (REASONING, {"content": "Yes", "reasoning_content": "t"}, ":Yes;"),
        (REASONING, {"content": "Yes", "reasoning": "t"}, ":[t]Yes;"),
    ],
)
def test_answers_are_written_as_by_transformers(
    template: str, answer: dict[str, Any], text: str
) -> None:
    got = written(template, [USER, {"role": "assistant", **answer}])
    assert got.endswith("assistant" + text)


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps([TOOL]),
        TOOL,
        json.dumps(TOOL),
        [json.dumps(TOOL)],
        [{"type": "function", "function": json.dumps(TOOL["function"])}],
        [{"type": "function", "function": {"name": "f", "parameters": '{"type": "object"}'}}],
    ],
)
def test_tools_in_other_variants_are_the_same_tools(tools: Any) -> None:
    want = json.dumps(TOOL) + ";"
    assert written(TOOLS, [USER], tools=[TOOL]) == written(TOOLS, [USER], tools=tools) == want


def test_a_tool_without_a_frame() -> None:
    tool = {"name": "f", "parameters": {"type": "object"}}
    text = tool | {"parameters": json.dumps(tool["parameters"])}
    assert written(TOOLS, [USER], tools=[text]) == json.dumps(tool) + ";"


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", "null", {}])
def test_no_tools_are_none(tools: Any) -> None:
    assert written(TOOLS, [USER], tools=tools) == "none"


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("search", "the text in 'tools' must be JSON but is not"),
        ('[{"name": ', "the text in 'tools' must be JSON but is not"),
        ("3", "'tools' must be a list of objects, or the JSON text of one, but holds 3"),
        ([["f"]], r"'tools' must be a list of objects.* but holds \['f'\]"),
        ([{"name": "f", "parameters": "{cut"}], "the text in 'parameters' must be JSON"),
    ],
)
def test_other_tools_are_refused(tools: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        written(TOOLS, [USER], tools=tools)


@pytest.mark.parametrize(
    "calls",
    [
        [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        [{"type": "function", "function": json.dumps(CALL["function"])}],
        json.dumps([CALL]),
    ],
)
def test_calls_in_json_are_the_same_calls(calls: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert written(CALLS, [USER, message]) == 'user:Hi;assistant:f{"a": 1};'


def test_arguments_that_are_a_text_stay_one() -> None:
    call = {"function": {"name": "python", "arguments": "print(1)"}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert written(CALLS, [message]) == 'assistant:python"print(1)";'
    call["function"]["arguments"] = '{"a": '
    with pytest.raises(UsageError, match="the text in 'arguments' must be JSON"):
        written(CALLS, [message])


def test_a_message_needs_a_role() -> None:
    with pytest.raises(UsageError, match="'messages' must be a list of at least one object with"):
        written(PLAIN, [{"role": None, "content": "Hi"}])


@pytest.mark.parametrize(
    ("template", "text"),
    [(PLAIN, "user:a b;"), (PARTS, "user:<a><b>;"), ("{{ bos_token }}" + PARTS, 0)],
)
def test_parts_of_a_message(template: str, text: str | int, tmp_path: Path) -> None:
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", template)
    got = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXTS}], add_generation_prompt=False, tokenize=False
    )
    assert got == (text or "<|begin_of_text|>user:<a><b>;")


def test_a_part_that_is_no_text_is_refused_by_a_template_of_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    messages = [USER, {"role": "user", "content": [*TEXTS, {"type": "image"}]}]
    with pytest.raises(
        UsageError, match=r"'messages\[1\].content' must be a text or a list.*image"
    ):
        tokenizer.apply_chat_template(messages)


def test_a_conversation_beyond_what_a_template_may_write_is_refused_at_once() -> None:
    message = {"role": "user", "content": "a" * (MAX_CHARACTERS // 2)}
    with pytest.raises(UsageError, match="'messages' must have at most 8,388,608 characters"):
        chat_data([message, message], True, {})
    assert chat_data([message], True, {})["messages"] == [message]
