"""Calls of tools in what models write, however the text is cut."""

import json
import random
import re
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from mlx_mmfree.generation.answers.answer_parts import Blocks, Finish, Part, PartReader, TextDelta
from mlx_mmfree.generation.answers.reasoning import ReasoningReader, ReasoningTags
from mlx_mmfree.server.tool_calls.call_formats import CallFormat, call_format
from mlx_mmfree.server.tool_calls.readers import (
    BareCalls,
    CallReader,
    GLMCalls,
    HermesCalls,
    MistralCalls,
    TaggedCalls,
    XMLCalls,
)
from mlx_mmfree.server.tool_calls.sources import (
    Source,
    call_or_json_source,
    call_source,
    strict_source,
)
from tests.server.conftest import with_template

pytestmark = pytest.mark.serve

CALL = '{"name": "look_up", "arguments": {"word": "a \\"fox\\" </tool>"}}'
TAGGED = f"<tool_call>{CALL}</tool_call>"
BARE = '{"name": "look_up", "parameters": {"word": "fox"}}'


def parts(reader: PartReader, text: str, seed: int = 0) -> list[str | tuple[str, object]]:
    """The parts that a reader finds in a text that comes in random chunks, neighbouring texts merged."""
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
        block.text
        if block.kind != "tool_call"
        else (block.name, json.loads(block.text) if block.is_complete else f"{block.text}…")
        for block in blocks.all
    ]


FUNCTIONS: dict[str, dict[str, Any]] = {
    "look_up": {
        "type": "object",
        "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "draw": {"type": "object", "properties": {}},
}


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
    assert parts(HermesCalls(FUNCTIONS), text, seed) == want


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
    assert parts(BareCalls(FUNCTIONS), text, seed) == want


def test_texts_are_not_held_back_longer_than_needed() -> None:
    reader = HermesCalls({})
    assert reader.add("Hello <b") == [TextDelta("Hello <b")]
    assert reader.add(" <tool") == [TextDelta(" ")]
    assert reader.add("box") == [TextDelta("<toolbox")]
    bare = BareCalls(FUNCTIONS)
    assert bare.add("Hello") == [TextDelta("Hello")] and bare.add(" {") == [TextDelta(" {")]


WORDS = ("look_up", {"word": 'a "b"\n<c>', "count": 3})
DRAW: tuple[str, dict[str, Any]] = ("draw", {})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("reader", "text", "want"),
    [
        (HermesCalls, '<tool_call>{"name": "draw", "arguments": {"a": [}', [("draw", '{"a": [}…')]),
        (HermesCalls, '<tool_call>{"arguments": {}, "name": "draw"}</tool_call>.', [DRAW, "."]),
        (
            BareCalls,
            f'{BARE}; {{"name": "draw", "parameters": {{}}}}',
            [("look_up", {"word": "fox"}), DRAW],
        ),
        (BareCalls, "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
        (
            MistralCalls,
            'So[TOOL_CALLS] [{"name": "draw", "arguments": {"a": "]"}}, '
            '{"name": "draw", "arguments": {}}]',
            ["So", ("draw", {"a": "]"}), DRAW],
        ),
        (
            MistralCalls,
            '[TOOL_CALLS]draw[ARGS]{"a": 1}[TOOL_CALLS]draw[CALL_ID]x1[ARGS]{}',
            [("draw", {"a": 1}), DRAW],
        ),
        (MistralCalls, "[TOOL_CALLS] none", ["[TOOL_CALLS] none"]),
        (
            TaggedCalls,
            '<function=draw>{"a": "</function>"}</function>\n<function=draw>{}</function>',
            [("draw", {"a": "</function>"}), DRAW],
        ),
        (TaggedCalls, "<function=draw> no", ["<function=draw> no"]),
        (
            XMLCalls,
            'Look\n<tool_call>\n<function=look_up>\n<parameter=word>\na "b"\n<c>\n</parameter>\n'
            "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=draw>\n</function>\n</tool_call>",
            ["Look\n", WORDS, DRAW],
        ),
        # a value without its end, a call without its first tag, a key that comes twice
        (
            XMLCalls,
            "<function=look_up><parameter=word>\nx</function>",
            [("look_up", {"word": "x"})],
        ),
        (
            XMLCalls,
            "<tool_call><function=draw><parameter=a>True</parameter><parameter=a>2</parameter></function>",
            [("draw", {"a": True})],
        ),
        (
            XMLCalls,
            "<tool_call>\n<function=look_up>\n<parameter=word>\nbroken o",
            [("look_up", '{"word": "broken o…')],
        ),
        (
            GLMCalls,
            'Hm<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>a "b"\n<c></arg_value>\n'
            "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>draw</tool_call>",
            ["Hm", WORDS, DRAW],
        ),
        (GLMCalls, "<tool_call>{}", ["<tool_call>{}"]),
    ],
)
def test_every_format(reader: type[CallReader], text: str, want: list[object], seed: int) -> None:
    assert parts(reader(FUNCTIONS), text, seed) == want


VALUES: dict[str, Any] = {
    "type": "object",
    "$defs": {"text": {"type": "string"}},
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "choice": {"enum": ["1", "2"]},
        "other": {"oneOf": [{"$ref": "#/$defs/text"}, {"type": "object"}]},
        "all": {"allOf": [{"$ref": "#/$defs/text"}, {"maxLength": 9}]},
        "const": {"const": "7"},
        "flag": {"type": "boolean"},
        "free": {},
    },
}
TYPED = {
    "optional": [("12345", "12345"), ("null", None), ("true", "true"), ('{"a": 1}', '{"a": 1}')],
    "either": [("5", 5), ("5.5", "5.5"), ("five", "five"), ("null", "null")],
    "choice": [("1", "1")],
    "other": [("1", "1"), ('{"a": 1}', {"a": 1}), ("[1]", "[1]")],
    "all": [("1", "1"), ("null", "null")],
    "const": [("7", "7")],
    "flag": [("True", True), ("false", False), ("perhaps", "perhaps")],
    "free": [("1", 1), ("True", True), ("fox", "fox")],
}


def tagged(format: str, **values: str) -> str:
    if format == "xml":
        texts = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function=f>\n{''.join(texts)}</function>\n</tool_call>"
    texts = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    return f"<tool_call>f\n{''.join(texts)}</tool_call>"


TAGGED_READERS: list[tuple[str, type[CallReader]]] = [("xml", XMLCalls), ("glm", GLMCalls)]


@pytest.mark.parametrize(("format", "reader"), TAGGED_READERS)
def test_values_have_a_type_that_their_schema_allows(format: str, reader: type[CallReader]) -> None:
    for key, pairs in TYPED.items():
        for text, want in pairs:
            found = parts(reader({"f": VALUES}), tagged(format, **{key: text}), 2)
            assert found == [("f", {key: want})], (key, text)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("format", "reader"), TAGGED_READERS)
def test_values_hold_tags(format: str, reader: type[CallReader], seed: int) -> None:
    names = {
        "VALUE": {"xml": "</parameter>", "glm": "</arg_value>"},
        "CALL": {"xml": "</function>", "glm": "</tool_call>"},
        "KEY": {"xml": "<parameter=content>", "glm": "<arg_key>content</arg_key>"},
        "PATH": {"xml": "<parameter=path>", "glm": "<arg_key>path</arg_key>"},
    }
    texts = [
        "Each ends with VALUE as said.",
        "VALUE",
        "VALUE VALUE\n\nVALUE x",
        "a CALL b VALUE\n c",
        "line\nCALL\nmore",
        # of an argument that was given, or amid a line
        "one\nPATH\ntwo",
        "the KEY tag",
        "a <",
        "\n\nb\n",
    ]
    for text in texts:
        for name, tag in names.items():
            text = text.replace(name, tag[format])
        written = tagged(format, path=text, content="c")
        want = {"path": text, "content": "c"}
        assert parts(reader({"f": VALUES}), written, seed) == [("f", want)], text
        written = tagged(format, path="p", optional=text)
        want = {"path": "p", "optional": text}
        assert parts(reader({"f": VALUES}), f"{written}\n{written}", seed) == 2 * [("f", want)], (
            text
        )
    # a tag of an argument that is to come ends the value before it
    written = tagged(format, path="p", content="c")
    written = written.replace("</parameter>\n", "", 1).replace("</arg_value>", "", 1)
    want = {"path": "p", "content": "c"}
    assert parts(reader({"f": VALUES}), written, seed) == [("f", want)]
    line = tagged(format, path="p", content="c").replace("\n", "")
    assert parts(reader({"f": VALUES}), line, seed) == [("f", want)]


ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ('{"word": "fox"}', {"word": "fox"}),
    ("null", {}),
    ('""', {}),
    ('"{\\"word\\": \\"fox\\"}"', {"word": "fox"}),
    ('{"word": "a\nb\tc\\\nd"}', {"word": "a\nb\tc\\\nd"}),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("arguments", "want"), ARGUMENTS)
def test_arguments_come_in_each_way(arguments: str, want: dict[str, Any], seed: int) -> None:
    found: list[str | tuple[str, object]] = [("look_up", want)]
    for key in ("arguments", "parameters", "input"):
        call = f'{{"name": "look_up", "{key}": {arguments}}}'
        turned = f'{{"{key}": {arguments}, "type": "function", "name": "look_up"}}'
        for text in (call, turned):
            assert parts(HermesCalls(FUNCTIONS), f"<tool_call>{text}</tool_call>", seed) == found
            assert parts(BareCalls(FUNCTIONS), text, seed) == found
            assert parts(MistralCalls(FUNCTIONS), f"[TOOL_CALLS] [{text}]", seed) == found
    assert parts(MistralCalls(FUNCTIONS), f"[TOOL_CALLS]look_up[ARGS]{arguments}", seed) == found
    written = f"<function=look_up>{arguments}</function>"
    assert parts(TaggedCalls(FUNCTIONS), written, seed) == found


def test_what_has_no_arguments_that_are_known_is_text() -> None:
    for given in ('"args": {"word": "fox"}', '"arguments": "fox"', '"arguments": [1]'):
        text = f'{{"name": "look_up", {given}}}'
        assert parts(BareCalls(FUNCTIONS), text) == [text]
        assert parts(HermesCalls(FUNCTIONS), f"<tool_call>{text}</tool_call>") == [
            f"<tool_call>{text}</tool_call>"
        ]
    assert parts(BareCalls(FUNCTIONS), '{"name": "draw"}') == [DRAW]
    assert parts(TaggedCalls(FUNCTIONS), "<function=draw></function>") == [DRAW]


def test_arguments_stream_while_they_are_written() -> None:
    begun = {
        HermesCalls: '<tool_call>{"name": "look_up", "arguments": {"word": "a fo',
        BareCalls: '{"name": "look_up", "parameters": {"word": "a fo',
        MistralCalls: '[TOOL_CALLS]look_up[ARGS]{"word": "a fo',
        TaggedCalls: '<function=look_up>{"word": "a fo',
        XMLCalls: "<tool_call><function=look_up><parameter=word>a fo",
        GLMCalls: "<tool_call>look_up<arg_key>word</arg_key><arg_value>a fo",
    }
    for reader, text in begun.items():
        blocks = Blocks()
        for part in reader(FUNCTIONS).add(text):
            blocks.add(part)
        (call,) = blocks.calls
        assert (call.name, call.text) == ("look_up", '{"word": "a fo'), reader


# as templates of these families write calls; Qwen3.5's in tests/data too
TURN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
)
CALLS = {
    HermesCalls: """<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>""",
    BareCalls: """{"name": "{{ c.function.name }}", """
    """"parameters": {{ c.function.arguments | tojson }}}""",
    MistralCalls: "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    TaggedCalls: "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>",
    XMLCalls: """<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>""",
    GLMCalls: """<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>""",
}


@pytest.mark.parametrize("reader", CALLS)
def test_what_a_template_writes_is_read(reader: type[CallReader], tmp_path: Path) -> None:
    template = "{{ tools }}" + TURN.replace("CALL", CALLS[reader])
    _, tokenizer = with_template(tmp_path / "m", template)
    format = call_format(tokenizer.chat_template_source(tools=True))
    assert format is not None and isinstance(format.reader(FUNCTIONS), reader)
    wanted = [("look_up", {"word": "the fox's \u00e9t\u00e9\n2", "count": 7}), DRAW]
    calls = [
        {"type": "function", "id": "c", "function": {"name": name, "arguments": arguments}}
        for name, arguments in wanted[: 1 if reader is BareCalls else 2]
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False).text
    text = text.partition("[assistant]")[2]
    assert parts(format.reader(FUNCTIONS), text, 3) == wanted[: len(calls)]


def test_templates_without_calls_have_no_format() -> None:
    for template in ("{{ messages }}", "{{ tools }}", '{{ tools }}<tool_call>{{ "x" }}'):
        assert call_format(template) is None


CHUNKS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "look_up",
        ">",
        "</function>",
        "<parameter=word>",
    ),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]"),
    *(
        "[ARGS]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        '{"name": "draw", "arguments": ',
        "{",
        "}",
    ),
    *("[", "]", '"', "\\", ",", ";", ":", " ", "\n", "é", "\0", "1", "fox"),
]


@pytest.mark.parametrize("reader", CALLS)
def test_hostile_texts(reader: type[CallReader]) -> None:
    """However a text is cut, the same is found; nothing raises."""
    rng = random.Random(5)
    for n in range(150):
        text = "".join(rng.choices(CHUNKS, k=rng.randint(1, 40)))
        found = []
        for seed in (1, 2):
            inner: PartReader = reader(FUNCTIONS)
            tags = ReasoningTags("<think>", "</think>")
            found.append(parts(ReasoningReader(inner, tags, n % 2 == 0), text, seed))
        assert found[0] == found[1], text


@pytest.mark.parametrize("reader", CALLS)
def test_time_grows_with_the_length_alone(reader: type[CallReader]) -> None:
    begins = {
        HermesCalls: '<tool_call>{"name": "draw", "arguments": {"a": ',
        BareCalls: '{"name": "draw", "a": ',
        MistralCalls: "[TOOL_CALLS]draw[ARGS]{",
        TaggedCalls: "<function=draw>{",
        XMLCalls: "<tool_call><function=draw><parameter=a>",
        GLMCalls: "<tool_call>draw<arg_key>a</arg_key><arg_value>",
    }
    for repeated in (" ", "[", "<tool_call>", begins[reader]):
        times = []
        for count in (2_000, 16_000):
            text = begins[reader] + repeated * (count // len(repeated))
            walk, start = reader(FUNCTIONS), thread_time()
            for offset in range(0, len(text), 3):
                walk.add(text[offset : offset + 3])
            walk.finalize()
            times.append(thread_time() - start)
        assert times[1] < 8 * 4 * times[0] + 0.05, (repeated, times)


SPECIAL = {"[TOOL_CALLS]": 256, "</think>": 258}


def accepts(source: Source, text: str, special: dict[str, int]) -> bool:
    """Returns whether a grammar lets a text through, and lets it end."""
    llguidance = pytest.importorskip("llguidance")

    class Bytes:
        tokens = (*(bytes([n]) for n in range(256)), b"[TOOL_CALLS]", b"<eos>", b"</think>")
        special_token_ids, bos_token_id, eos_token_id = (256, 257, 258), None, 257
        is_tokenizer_wrapper = True

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    vocabulary = llguidance.LLTokenizer(Bytes(), eos_token=[257])
    grammar = llguidance.LLMatcher.grammar_from_lark(source.text)
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tags = "|".join(map(re.escape, special)) or "(?!)"
    for part in re.split(f"({tags})", text):
        ids = [special[part]] if part in special else list(part.encode())
        if not all(matcher.consume_token(token) for token in ids):
            return False
    return bool(matcher.is_accepting())


def a_call(format: CallFormat, name: str, **arguments: object) -> str:
    """A call as the template of a format writes it."""
    text = format.begin.replace("NAME", name)
    if format.argument is None:
        return f"{format.open}{text}{json.dumps(arguments)}{format.end}{format.close}"
    begin, end = format.argument
    values = (f"{begin.replace('KEY', key)}{value}{end}" for key, value in arguments.items())
    return f"{text}{''.join(values)}{format.end}"


GRAMMAR_FORMATS = {
    **{reader.__name__: call for reader, call in CALLS.items()},
    "MistralList": '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": }]',
}


def format_named(name: str) -> CallFormat:
    format = call_format("{{ tools }}" + GRAMMAR_FORMATS[name])
    assert format is not None
    return format


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize("name", GRAMMAR_FORMATS)
def test_grammars_let_calls_of_every_format_through(name: str, special: dict[str, int]) -> None:
    format = format_named(name)
    good = a_call(format, "look_up", word="a fox", count=7)
    assert parts(format.reader(FUNCTIONS), good) == [("look_up", {"word": "a fox", "count": 7})]
    for reasoning_text in (None, "</think>"):
        source = call_source(format, FUNCTIONS, special, reasoning_text)
        before = "" if reasoning_text is None else "Hm.</think>\n\n"
        assert accepts(source, before + good, special)
        assert accepts(source, before + a_call(format, "draw"), special)
        for bad in (good.replace("7", "x"), a_call(format, "look_up", count=7), "Hello"):
            assert not accepts(source, before + bad, special), bad


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize("name", GRAMMAR_FORMATS)
def test_strict_calls_are_held_within_any_text(name: str, special: dict[str, int]) -> None:
    format = format_named(name)
    functions = {**FUNCTIONS, "loose": {"type": "object", "properties": {}}}
    strict = {"look_up": FUNCTIONS["look_up"]}
    good = a_call(format, "look_up", word="a fox", count=7)
    loose, bad = a_call(format, "loose", x="y"), a_call(format, "look_up", word="a fox", count="x")
    text = "" if name == "BareCalls" else "So:\n"
    tags = ReasoningTags("<think>", "</think>")
    free = strict_source(format, functions, strict, special, None, False)
    for answer in (good, f"{text}{good}", loose, "Hello {a} <b", ""):
        assert accepts(free, answer, special), answer
    assert not accepts(free, f"{text}{bad}", special)
    opened = strict_source(format, functions, strict, special, tags, True)
    for answer in (f"Hm.</think>\n\n{text}{good}", "Hm.</think>Hello", "Hm."):
        assert accepts(opened, answer, special), answer
    assert not accepts(opened, f"Hm.</think>\n\n{bad}", special)
    if "[TOOL_CALLS]" in bad and special:
        return
    # calls within reasoning are none
    assert accepts(opened, f"Like {bad}, or not.</think>{text}{good}", special)
    may_open = strict_source(format, functions, strict, special, tags, False)
    for answer in (f"<think>Like {bad}</think>{text}{good}", good, "Hello", "\n<think>Hm."):
        assert accepts(may_open, answer, special), answer
    for answer in (f"<think>Hm.</think>{bad}", bad):
        assert not accepts(may_open, answer, special), answer


@pytest.mark.parametrize("name", GRAMMAR_FORMATS)
def test_a_schema_lets_calls_through(name: str) -> None:
    format = format_named(name)
    schema = {"$ref": "#/$defs/a", "$defs": {"a": FUNCTIONS["look_up"]}}
    strict = {"look_up": FUNCTIONS["look_up"]}
    good = a_call(format, "look_up", word="a fox", count=7)
    for many in (True, False):
        source = call_or_json_source(format, FUNCTIONS, strict, schema, {}, None, many)
        for answer in (good, a_call(format, "draw", any=1), '{"word": "fox"}'):
            assert accepts(source, answer, {}), answer
        for answer in ("Hello", '{"word": 1}', a_call(format, "look_up", count=7), f"So: {good}"):
            assert not accepts(source, answer, {}), answer
        if not format.open and name != "BareCalls":
            assert accepts(source, f"{good}\n{good}", {}) == many


def test_each_call_has_an_id_of_its_own() -> None:
    blocks = Blocks()
    for part in HermesCalls({}).add(2 * TAGGED + "."):
        blocks.add(part)
    assert len({call.id for call in blocks.calls}) == 2
