"""A chat template in the format of Qwen3.5's: the prompt opens the thinking, tools are XML."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import UsageError
from mlx_mmfree.generation import generate
from mlx_mmfree.hub import load
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.models.families import in_floats

DATA = Path(__file__).parents[1] / "data"
TEMPLATE = DATA / "qwen35.jinja"
HI, YES = {"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes"}
REASONING = {"role": "assistant", "content": "<think>\nso\n</think>\n\nYes"}
ASIDE = {"role": "assistant", "content": "Yes", "reasoning_content": "so"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {
                "name": "find",
                "arguments": '{"text": "a <b>\\n\\"c\\"", "most": 3, "of": ["x"]}',
            },
        },
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
PROMPT = "<|im_start|>assistant\n<think>\n"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    folder = shutil.copytree(DATA / "goldens" / "tokenizer_bpe", tmp_path / "t")
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return Tokenizer.from_folder(folder)


def rendered(tokenizer: Tokenizer, *messages: Any, **variables: Any) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **variables)
    assert isinstance(text, str)
    return text


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_the_prompt_opens_the_thinking(tokenizer: Tokenizer) -> None:
    asked = turn("user", "Hi")
    assert rendered(tokenizer, HI) == asked + PROMPT
    assert rendered(tokenizer, HI, enable_thinking=True) == asked + PROMPT
    closed = rendered(tokenizer, HI, enable_thinking=False)
    assert closed == f"{asked}{PROMPT}\n</think>\n\n"
    assert rendered(tokenizer, HI, add_generation_prompt=False) == asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights with the template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    in_floats(folder, "qwen3_5_text")
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


def test_a_model_chats_with_thinking_on_and_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, tokenizer = load(folder, dtype=mx.float32)
    answers: set[str] = set()
    for thinks in (True, False):
        messages: list[dict[str, str]] = []
        replies: list[str] = []
        for asked in ("Hi", "And you?"):
            messages.append({"role": "user", "content": asked})
            ids = tokenizer.apply_chat_template(messages, enable_thinking=thinks)
            assert isinstance(ids, list)
            end = PROMPT if thinks else f"{PROMPT}\n</think>\n\n"
            assert tokenizer.decode(ids).endswith(end)
            replies.append(generate(model, tokenizer, ids, max_tokens=6, is_answer=True))
            messages.append({"role": "assistant", "content": replies[-1]})
        answers.update(replies)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\nAnd you?\n")))
        variables = json.dumps({"enable_thinking": thinks})
        flags = ["--dtype", "float32", "--temp", "0", "--max-tokens", "6"]
        arguments = ["--model", str(folder), "--chat-template-args", variables]
        assert main(["chat", *arguments, *flags]) == 0
        shown = capsys.readouterr().out
        assert [line.partition(" [stopped")[0] for line in shown.split("\n")[1:3]] == replies
    assert len(answers) > 2, answers


@pytest.mark.parametrize("answer", [REASONING, ASIDE])
def test_earlier_thinking_is_dropped(tokenizer: Tokenizer, answer: dict[str, Any]) -> None:
    before, asked = turn("user", "Hi"), turn("user", "Hi")
    last_turn = turn("assistant", "<think>\nso\n</think>\n\nYes")
    assert rendered(tokenizer, HI, answer, HI) == before + turn("assistant", "Yes") + asked + PROMPT
    whole = rendered(tokenizer, HI, answer, HI, preserve_thinking=True)
    assert whole == before + last_turn + asked + PROMPT
    # the turn that is not over keeps it
    assert rendered(tokenizer, HI, answer, add_generation_prompt=False) == before + last_turn


def test_calls_and_results_are_xml(tokenizer: Tokenizer) -> None:
    text = rendered(
        tokenizer, {"role": "system", "content": "Be kind."}, HI, CALL, *RESULTS, tools=TOOLS
    )
    head, _, rest = text.partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\n# Tools") and head.endswith(
        "</tool_call>\n\nBe kind."
    )
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in head
    call = (
        '<tool_call>\n<function=find>\n<parameter=text>\na <b>\n"c"\n</parameter>\n'
        '<parameter=most>\n3\n</parameter>\n<parameter=of>\n["x"]\n</parameter>\n</function>\n</tool_call>'
        "\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    )
    results = "<tool_response>\nfound\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    reply = turn("assistant", f"<think>\n\n</think>\n\n{call}")
    assert rest == turn("user", "Hi") + reply + turn("user", results) + PROMPT


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([YES], "No user query found in messages"),
        ([HI, {"role": "system", "content": "x"}], "System message must be at the beginning"),
        ([{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}], "No user query"),
        ([HI, {"role": "critic", "content": "x"}], "Unexpected message role"),
    ],
)
def test_what_the_template_refuses_is_reported(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        rendered(tokenizer, *messages)


@pytest.mark.parametrize(("generation", "ends"), [([517, 513], {517, 513}), (None, {513})])
def test_turns_end_where_the_generation_settings_say(
    tmp_path: Path, generation: list[int] | None, ends: set[int]
) -> None:
    """The end token of `config.json` ends texts, not turns."""
    folder = shutil.copytree(DATA / "goldens" / "tokenizer_bpe", tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 513}}))
    settings = {} if generation is None else {"eos_token_id": generation}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_folder(folder).eos_token_ids == ends


CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([HI], {}),
    ([HI], {"enable_thinking": False}),
    ([HI, REASONING, HI], {}),
    ([HI, ASIDE, HI], {"preserve_thinking": True}),
    (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
        {},
    ),
    ([HI, {**CALL, "content": "I look."}, *RESULTS, YES, HI], {"tools": TOOLS}),
]


@pytest.mark.interop
@pytest.mark.parametrize(("messages", "variables"), CONVERSATIONS)
def test_transformers_renders_the_same(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    parsed = json.loads(json.dumps(messages))
    for message in parsed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    texts, _ = render_jinja_template(
        [parsed], chat_template=TEMPLATE.read_text(), add_generation_prompt=True, **variables
    )
    assert rendered(tokenizer, *messages, **variables) == texts[0]
