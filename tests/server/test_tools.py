"""Calls of tools in what models write, however the text is cut."""

import json
import random

import pytest

from mlx_mmfree.generation.answer_parts import Blocks, Finish, Part, PartReader, TextDelta
from mlx_mmfree.server.tools import BareCalls, TaggedCalls, call_form

pytestmark = pytest.mark.serve

CALL = '{"name": "look_up", "arguments": {"word": "a \\"fox\\" </tool>"}}'
TAGGED = f"<tool_call>{CALL}</tool_call>"
BARE = '{"name": "look_up", "parameters": {"word": "fox"}}'


def parts(reader: PartReader, text: str, seed: int = 0) -> list[str | tuple[str, object]]:
    """What a reader finds in a text that comes in random pieces, neighbouring texts joined."""
    rng = random.Random(seed)
    found: list[Part] = []
    while text:
        size = rng.randint(1, 9)
        found += reader.add(text[:size])
        text = text[size:]
    blocks = Blocks()
    for part in [*found, *reader.finalize(), Finish("stop")]:
        blocks.add(part)
    return [
        (block.name, json.loads(block.text)) if block.kind == "tool_call" else block.text
        for block in blocks.all
    ]


WORD = ("look_up", {"word": 'a "fox" </tool>'})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Hello <b>you</b>", ["Hello <b>you</b>"]),
        (f"<tool_call>\n{CALL}\n</tool_call>", [WORD]),
        (
            f"I see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
            ["I see.\n", WORD, WORD],
        ),
        # without the last tag, as small models end
        (f"<tool_call>{CALL}", [WORD]),
        # what is no call stays what was written
        ("<tool_call>fox</tool_call>!", ["<tool_call>fox</tool_call>!"]),
        ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
        ("a <tool_cal", ["a <tool_cal"]),
        ("<tool_call>[", ["<tool_call>["]),
    ],
)
def test_calls_between_tags(text: str, want: list[object], seed: int) -> None:
    assert parts(TaggedCalls(), text, seed) == want


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("text", "want"),
    [
        (BARE, [("look_up", {"word": "fox"})]),
        (f"<|python_tag|>{BARE}", [("look_up", {"word": "fox"})]),
        (f" \n{BARE}\n", [("look_up", {"word": "fox"})]),
        ("Hello {you}", ["Hello {you}"]),
        ('{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
        ('{"a": 1', ['{"a": 1']),
    ],
)
def test_calls_without_tags(text: str, want: list[object], seed: int) -> None:
    assert parts(BareCalls(["look_up"]), text, seed) == want


def test_texts_are_not_held_back_longer_than_needed() -> None:
    reader = TaggedCalls()
    assert reader.add("Hello <b") == [TextDelta("Hello <b")]
    assert reader.add(" <tool") == [TextDelta(" ")]
    assert reader.add("box") == [TextDelta("<toolbox")]
    bare = BareCalls(["look_up"])
    assert bare.add("Hello") == [TextDelta("Hello")] and bare.add(" {") == [TextDelta(" {")]


# as they stand in published templates: strings of Jinja with and without escaped quotes, and XML
QWEN3 = (
    r"""{{ tools }}{{- "<tool_call>\\n{\"name\": <name>, \"arguments\": <args-json-object>}" }}"""
)
LLAMA3 = """{{ tools }}{{- 'format {"name": function name, "parameters": dictionary}' }}"""
GLM = "{{ tools }}<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>{{ c.arguments }}"
CODER = """{{ tools }}<tool_call><function=example><parameter=name>{{ '"name"' }}"""


def test_the_form_is_told_by_the_template() -> None:
    tagged, bare = call_form(QWEN3), call_form(LLAMA3)
    assert tagged is not None and isinstance(tagged.reader(["f"]), TaggedCalls)
    assert bare is not None and isinstance(bare.reader(["f"]), BareCalls)
    for other in ("{{ messages }}", "{{ tools }}", GLM, CODER):
        assert call_form(other) is None


@pytest.mark.parametrize("template", [QWEN3, LLAMA3])
def test_what_a_form_writes_is_read(template: str) -> None:
    form = call_form(template)
    assert form is not None
    text = f'{form.begin}{{"name": "f", "{form.arguments}": {{"a": 1}}}}{form.end}'
    assert parts(form.reader(["f"]), text) == [("f", {"a": 1})]


def test_each_call_has_an_id_of_its_own() -> None:
    blocks = Blocks()
    for part in TaggedCalls().add(2 * TAGGED):
        blocks.add(part)
    assert len({call.id for call in blocks.calls}) == 2
