"""Chat templates: what they may use, what messages may not do, and what hostile ones meet."""

import copy
import json
import pickle
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import CheckpointError, UsageError
from mlx_mmfree.tokenizer import chat as chat_template
from mlx_mmfree.tokenizer.chat import ChatTemplate
from mlx_mmfree.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
NAMES = ["tokenizer_spm", "tokenizer_bpe"]
USER = [{"role": "user", "content": "Hi"}]
TALK = [*USER, {"role": "assistant", "content": "<think>hm</think>\nYes"}, USER[0]]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source, Path("folder")).render({"messages": messages, **variables})


def with_template(folder: Path, target: Path, template: Any) -> Tokenizer:
    shutil.copytree(folder, target)
    file = target / "tokenizer_config.json"
    entries = json.loads(file.read_text()) | {"chat_template": template}
    file.write_text(json.dumps(entries))
    return Tokenizer.from_folder(target)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}", "  user\n"),
        ("{%- for m in messages %}{{ m['content'] | trim | upper }}{% break %}{% endfor %}", "HI"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aHib"),
        ("{{ {'a': ['\u00e9', 1.5, none, true]} | tojson }}", '{"a": ["\u00e9", 1.5, null, true]}'),
        ("{{ {'b': 1, 'a': '<'} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": "<"\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) ~ f('a') }}", "<1><a>"),
        ("{% set n = namespace(x=1) %}{% for m in [1, 2] %}{% set n.x = 9 %}{% endfor %}{{ n.x }}", "9"),
        ("{{ messages[::-1] | map(attribute='role') | join(', ') }}", "user"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip() }}", "b"),
        ("{{ '%s-%d' % ('a', 3) }} {{ '{}'.format('b') }} {{ '%s' | format('c') }}", "a-3 b c"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}", "TrueTrueFalse"),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{{ loop.last }}{% endfor %}", "x1True"),
    ],
)  # fmt: skip
def test_language(source: str, text: str) -> None:
    assert render(source) == text


def test_template_file_goes_before_the_config(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDENS / "tokenizer_bpe", tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.from_folder(folder).apply_chat_template(USER, tokenize=False) == "Hi!"


def test_named_templates(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "two", templates)
    assert tokenizer.apply_chat_template(USER, tokenize=False) == "plain"
    tools = [{"name": "search"}]
    assert tokenizer.apply_chat_template(USER, tokenize=False, tools=tools) == "search"
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "one", [templates[1]])
    assert tokenizer.apply_chat_template(USER, tokenize=False, tools=tools) == "search"
    other = [{"name": name, "template": "x"} for name in ("rag", "code")]
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "none", other)
    with pytest.raises(CheckpointError, match="but names 'rag', 'code'"):
        tokenizer.apply_chat_template(USER)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A tokenizer whose files hold no chat template."""
    with_template(GOLDENS / "tokenizer_bpe", tmp_path / "bare", None)
    return tmp_path / "bare"


def template_files(folder: Path, **templates: str) -> None:
    """Writes templates as transformers does since 4.52."""
    (folder / "additional_chat_templates").mkdir()
    for name, text in templates.items():
        file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (folder / f"{file}.jinja").write_text(text)


def rendered(folder: Path, **variables: Any) -> Any:
    return Tokenizer.from_folder(folder).apply_chat_template(USER, tokenize=False, **variables)


@pytest.mark.parametrize(
    "value",
    ["", "  \n", None, [], {}, {"default": ""}, [{"name": "default", "template": ""}]],
    ids=repr,
)
def test_an_empty_template_is_none(tmp_path: Path, value: Any) -> None:
    """An empty template is ignored, as in llama.cpp; transformers would write an empty conversation."""
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", value)
    assert not tokenizer.has_chat_template
    (tmp_path / "copy" / "chat_template.jinja").write_text("\n")
    assert not Tokenizer.from_folder(tmp_path / "copy").has_chat_template


def test_an_empty_file_leaves_the_template_of_the_config(tmp_path: Path) -> None:
    with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", "config")
    template_files(tmp_path / "copy", default="", tool_use=" ")
    assert rendered(tmp_path / "copy") == rendered(tmp_path / "copy", tools=TOOLS) == "config"


def test_named_templates_in_their_folder(bare: Path) -> None:
    """Named templates are read as transformers 5.24.0 reads them."""
    template_files(bare, default="plain", tool_use="with {{ tools | length }} tool", rag="other")
    assert rendered(bare) == rendered(bare, tools=None) == rendered(bare, tools=[]) == "plain"
    assert rendered(bare, tools=TOOLS) == "with 1 tool"
    tokenizer = Tokenizer.from_folder(bare)
    assert sorted(tokenizer.chat_templates) == ["default", "rag", "tool_use"]
    assert tokenizer.chat_template_source(tools=True) == "with {{ tools | length }} tool"


def test_files_go_before_named_templates_of_the_config(tmp_path: Path) -> None:
    """Transformers 5.24.0, too, reads no template of the configuration if there is a file."""
    templates = [{"name": name, "template": f"config {name}"} for name in ("default", "tool_use")]
    with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", templates)
    assert rendered(tmp_path / "copy", tools=TOOLS) == "config tool_use"
    template_files(tmp_path / "copy", default="file")
    assert rendered(tmp_path / "copy", tools=TOOLS) == "file"
    template_files(shutil.copytree(GOLDENS / "tokenizer_bpe", tmp_path / "other"), tool_use="file")
    assert rendered(tmp_path / "other", tools=TOOLS) == "file"
    assert rendered(tmp_path / "other") != "file"


def test_named_templates_of_an_object(tmp_path: Path) -> None:
    templates = {"default": "plain", "tool_use": "tools"}
    with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", templates)
    assert (rendered(tmp_path / "copy"), rendered(tmp_path / "copy", tools=TOOLS)) == (
        "plain",
        "tools",
    )


def test_templates_that_are_refused(bare: Path, tmp_path: Path) -> None:
    template_files(bare, tool_use="x" * 128_001)
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja' cannot be read: it has 128,001"):
        Tokenizer.from_folder(bare)
    template_files(tmp_path, **{f"n{number}": "x" for number in range(65)})
    shutil.rmtree(bare / "additional_chat_templates")
    (tmp_path / "additional_chat_templates").rename(bare / "additional_chat_templates")
    with pytest.raises(CheckpointError, match="must hold at most 64 chat templates but holds 65"):
        Tokenizer.from_folder(bare)
    shutil.rmtree(bare / "additional_chat_templates")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tool_use.jinja").write_text("secret")
    (bare / "additional_chat_templates").symlink_to("../elsewhere")
    with pytest.raises(CheckpointError, match=r"outside of its folder"):
        Tokenizer.from_folder(bare)


def test_missing_template(tmp_path: Path) -> None:
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", None)
    assert not tokenizer.has_chat_template
    with pytest.raises(CheckpointError, match=r"has none.*tokenizer\.with_chat_template"):
        tokenizer.apply_chat_template(USER)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "content",
    [
        "{special}",
        "a {special} b",
        "{special}{special}",
        "  {special}\n",
        "\U000f0000{special}\U0010fffd",
        "x {special}</s><s><unk><|end_of_text|> y",
    ],
)
def test_messages_never_make_control_tokens(name: str, content: str) -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / name)
    special = tokenizer.id_to_piece(next(iter(tokenizer.eos_token_ids)))
    control = set(tokenizer.special_tokens.values())

    def controls(text: str) -> list[int]:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return [number for number in ids if number in control]

    message = [{"role": "user", "content": content.replace("{special}", special)}]
    assert controls(message[0]["content"]) == controls("harmless")
    text = tokenizer.apply_chat_template(message, tokenize=False)
    ids = tokenizer.apply_chat_template(message)
    first = 1 if tokenizer.decode(ids[:1]) == "<s>" else 0
    assert tokenizer.decode(ids[first:]) == (text.removeprefix("<s>") if first else text)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}{{ messages[1].content }}",
        "{{ messages[0].content }}_id|>",
        "<|eot{{ messages[1].content }}",
        "{{ messages[0].content ~ messages[1].content | trim }}",
    ],
)
def test_halves_of_control_tokens_do_not_meet(template: str, tmp_path: Path) -> None:
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", template)
    halves = [{"role": "user", "content": text} for text in ("<|eot", "_id|>")]
    ids = tokenizer.apply_chat_template(halves)
    assert 517 not in ids
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(halves, tokenize=False)


def test_templates_build_control_tokens_from_role_names(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer = with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", template)
    messages = [{"role": "eot_id", "content": "Hi <"}]
    assert tokenizer.apply_chat_template(messages)[0] == 517


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", ["a <", "> b", "</", "|>", "<|", "s>"])
def test_pieces_of_control_tokens_change_no_ids(name: str, content: str) -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / name)
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert tokenizer.apply_chat_template(messages) == ids


def test_messages_are_not_changed() -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    messages = [{"role": "user", "content": "<|eot_id|>"}]
    tokenizer.apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "<|eot_id|>"}]


@pytest.mark.parametrize(
    "messages", [[], None, "Hi", ["Hi"], [{"content": "Hi"}], [{"role": "user", "content": b"x"}]]
)
def test_bad_messages(messages: Any) -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    with pytest.raises(UsageError, match=r"\[apply_chat_template\] 'messages' must"):
        tokenizer.apply_chat_template(messages)


def test_other_values_are_refused_by_their_own_name() -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    with pytest.raises(UsageError, match=r"'tools' must hold only texts.* but got function"):
        tokenizer.apply_chat_template(USER, tools=[test_refused_messages])


def test_refused_messages() -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_spm")
    with pytest.raises(UsageError, match="refuses the messages: Conversation roles must alternate"):
        tokenizer.apply_chat_template([*USER, *USER])


LOOP, END = "{% for a in range(99999) %}", "{% endfor %}"
LONG = "{% set b = 'abcdefgh' * 1000000 %}"
DOUBLE = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = STEP %}{% endfor %}"
NEST = DOUBLE.replace("99", "25")
NUMBER = "(('f' * 8000000) | int(0, 16))"
# each is one operation, or few, that a check between operations cannot stop
HOSTILE = {
    "recursive macros": "{% macro f(n) %}{% if n %}{% set _ = f(n - 1) %}{% set _ = f(n - 1) %}"
    "{% endif %}{% endmacro %}{{ f(90) }}",
    "endless macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "search": "{{ ('a' * 2000000).rfind('ab' ~ 'a' * 100000) }}",
    "cuts": "{{ ('a' * 2000000).rsplit('ab' ~ 'a' * 100000) | length }}",
    "division": "{{ " + NUMBER + " // (('f' * 4000000) | int(0, 16)) > 1 }}",
    "remainder": "{{ " + NUMBER + " % (('f' * 4000000) | int(0, 16)) > 1 }}",
    "power": "{{ 9**(9**9) > 1 }}",
    "nested namespaces": NEST.replace("STEP", "[namespace(a=n.x, b=n.x), n.x]") + "{{ n.x }}",
    "nested views": NEST.replace("STEP", "dict(a=n.x, b=n.x).values()") + "{{ n.x }}",
    "shared dictionaries": DOUBLE.replace("STEP", "dict(a=n.x, b=n.x)") + "{{ n.x | tojson }}",
    "deep lists": DOUBLE.replace("99", "9999").replace("STEP", "[n.x]") + "{{ n.x }}",
    "markup field": "{{ ('{0:>900000000}' | safe).format('x') }}",
    "escaped markup": "{% autoescape true %}{{ ('%900000000d' | safe) % 1 }}{% endautoescape %}",
    "separators": "{{ range(99999) | list | tojson(separators=['x' * 8000000, ':']) }}",
    "indentation": "{{ [1, 2] | tojson(indent=1000000000) }}",
    "many long texts": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set n.x = n.x + ['a' * 8000000 ~ i] %}{% endfor %}",
    "text product": "{{ 'a' * 10**12 }}",
    "format": DOUBLE.replace("STEP", "'{0}{0}'.format(n.x)"),
    "captures": DOUBLE.replace(
        "{% set n.x = STEP %}", "{% set q %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = q %}"
    ),
    "wide field": "{{ '{:{}}'.format(1, 1000000000) }}",
    "long output": LONG + LOOP + "{{ b }}" + END,
    "words": "{{ lipsum(n=99999, min=9999, max=99999) }}",
}  # fmt: skip


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits that hostile templates reach soon."""
    small = replace(chat_template.TEMPLATE, memory_bytes=64 * 2**20, seconds=0.05)
    confined = small.process()
    monkeypatch.setattr(chat_template, "_renderer", confined)
    monkeypatch.setattr(chat_template, "TEMPLATE", small)
    yield
    confined.close()


@pytest.mark.sample(2)
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template of 'folder' cannot be used"):
        render(source)


@pytest.mark.usefixtures("narrow")
def test_a_limit_harms_no_later_template() -> None:
    for source in (HOSTILE["search"], HOSTILE["text product"]):
        with pytest.raises(CheckpointError, match=r"over 0\.05 seconds|over 64 MB of memory"):
            render(source)
        assert render("{{ messages[0].content }}") == "Hi"


def test_long_output_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"it writes over 1000\d{3} characters"):
        render("{{ strftime_now('%Y' * 10**6) }}")
    with pytest.raises(CheckpointError, match=r"it writes over 1000\d{3} characters"):
        render("{{ 'a' * 8388609 }}")
    text = render("{{ ('\u4e00\u00e9' * 500_000) }}")
    assert text == "\u4e00\u00e9" * 500_000


def test_messages_keep_their_values() -> None:
    data = {1: "a", "b": [1.5, None, True, float("inf"), 2**70], "c": "\ud800", "d": ("x",)}
    message = {"role": "user", "content": data}
    text = render("{{ messages[0].content }}", [message])
    assert text == str({**data, "d": ("x",)})


def test_very_deep_messages() -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="must be nested at most 100 deep"):
        tokenizer.apply_chat_template([{"role": "user", "content": deep}])


def test_environment_and_modules_of_the_process_are_few() -> None:
    render("x")
    process_id = chat_template._renderer.process_id
    if Path("/proc").exists():
        names = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
        assert {name.split(b"=")[0] for name in names} <= {
            b"",
            b"TZ",
            b"LD_LIBRARY_PATH",
            b"LC_CTYPE",
        }
        assert b"mlx" not in Path(f"/proc/{process_id}/maps").read_bytes().replace(
            b"mlx_mmfree", b""
        )


def test_tokenizers_are_copied_and_pickled() -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_spm")
    ids = tokenizer.apply_chat_template(USER)
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other.apply_chat_template(USER) == ids


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages[0].__init__.__self__ }}",
        "{{ dict.fromkeys([1]) }}",
        "{{ 'a'.encode() }}",
        "{{ (1).to_bytes(9, 'big') }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% if %}",
        "{{ 1 // 0 }}",
        "{{ undefined.name }}",
        "{{" + "(" * 5000 + ")" * 5000 + "}}",
        "{{ 1" + " + 1" * 20000 + " }}",
    ],
)
def test_faulty_templates(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template of 'folder' cannot be used"):
        render(source)


def test_template_in_tokenizer_is_limited(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'chat_template' must have at most 128000 bytes"):
        with_template(GOLDENS / "tokenizer_bpe", tmp_path / "copy", "x" * 128001)


@pytest.mark.interop
def test_equals_transformers() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = (
        "{%- macro extra(d) %}{% for k, v in d.items() %}<{{ k }}>{{ v | tojson }}{% endfor %}"
        "{% endmacro %}{% if tools %}{{ tools | tojson(indent=4) }}{{ extra(tools[0]) }}{% endif %}"
        "{%- for m in messages %}\n  {% set c = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ '<|' ~ m.role ~ '|>' + c }}"
        "{% endgeneration %}{% else %}{{ m.content | trim }}{{ eos_token }}{% endif %}\n"
        "{{ loop.index }} {{ loop.length }}{%- endfor %}"
    )
    for tools in (None, [{"name": "<f> & \u00e9", "arguments": {"a": [1, None]}}]):
        variables = {"messages": TALK, "tools": tools, "eos_token": "</s>"}
        assert render(source, TALK, tools=tools, eos_token="</s>") == (
            _compile_jinja_template(source).render(**variables)
        )


def test_a_conversation_of_special_tokens_takes_a_few_times_its_size(tmp_path: Path) -> None:
    tokenizer = with_template(GOLDENS / NAMES[1], tmp_path / "m", "{{ messages[0].content }}")
    text = "<|eot_id|>" * 200_000
    tokenizer.render_chat([{"role": "user", "content": "a"}])
    tracemalloc.start()
    try:
        chat = tokenizer.render_chat([{"role": "user", "content": text}])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chat.text == text
    # characters for private use take two bytes
    assert peak < 7 * len(text)
