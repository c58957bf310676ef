"""Reasoning is separated from the text however it is cut, and ends after its budget of tokens."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation import Chat, generate_tokens
from mlx_mmfree.generation.answers.answer_parts import (
    Blocks,
    Finish,
    TextDelta,
    TextReader,
    ThinkingDelta,
)
from mlx_mmfree.generation.answers.reasoning import (
    ReasoningBudget,
    ReasoningReader,
    ReasoningTags,
    reasoning_tags,
    with_reasoning,
)
from mlx_mmfree.hub import Tokenizer
from tests.generation.models import Dictation
from tests.generation.test_chat import PLAIN, with_template
from tests.hub.checkpoints import tiny_of

TAGS = ReasoningTags("<think>", "</think>")
THINKING = PLAIN.replace("assistant<|end_header_id|>", "assistant<|end_header_id|><think>")


def blocks(text: str, is_open: bool, seed: int) -> list[tuple[str, str]]:
    rng, reader, found = random.Random(seed), ReasoningReader(TextReader(), TAGS, is_open), Blocks()
    parts = []
    while text:
        size = rng.randint(1, 7)
        parts += reader.add(text[:size])
        text = text[size:]
    for part in [*parts, *reader.finalize(), Finish("stop")]:
        found.add(part)
    return [(block.kind, block.text) for block in found.all]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("is_open", "text", "want"),
    [
        (True, "\na\n\nb \n</think>\n\nYes", [("thinking", "a\n\nb"), ("text", "Yes")]),
        (False, "<think>\na\n</think>\n\nYes", [("thinking", "a"), ("text", "Yes")]),
        (True, "<think>a</think>Yes", [("thinking", "a"), ("text", "Yes")]),
        (True, "</think>\n\nYes", [("text", "Yes")]),
        (False, "Yes <think>a</think>", [("text", "Yes <think>a</think>")]),
        # never closed, and with what looks like a call
        (True, "a <tool_call>{} </thin", [("thinking", "a <tool_call>{} </thin")]),
        (False, " \n<thi", [("text", " \n<thi")]),
        (True, " \n ", []),
    ],
)
def test_reasoning_is_reported_from_the_text(
    is_open: bool, text: str, want: list[tuple[str, str]], seed: int
) -> None:
    assert blocks(text, is_open, seed) == want


def test_tags_are_reported_by_the_template() -> None:
    assert reasoning_tags("{{ '<think>' }}") == TAGS
    assert reasoning_tags("{{ m.split('[/THINK]') }}") == ReasoningTags("[THINK]", "[/THINK]")
    assert reasoning_tags("{{ messages }}") is None
    assert TAGS.are_open("<|im_start|>assistant\n<think>\n")
    assert not TAGS.are_open("<think>\n\n</think>\n\n")


def test_reasoning_is_where_the_template_looks() -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning": "Hm"}
    assert with_reasoning(message, "{{ m.reasoning_content }}")["reasoning_content"] == "Hm"
    assert with_reasoning(message, "{{ m.thinking }}")["thinking"] == "Hm"
    inline = with_reasoning(message, "{{ m.content.split('</think>') }}")
    assert inline["content"] == "<think>\nHm\n</think>\n\nYes" and "reasoning" not in inline
    assert with_reasoning(message, "{{ m.content }}") == {"role": "assistant", "content": "Yes"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return with_template(tmp_path / "thinking", THINKING)


@pytest.mark.sample(2)
@pytest.mark.parametrize("most", [0, 5, 100])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_closes_reasoning(tokenizer: Tokenizer, most: int, is_open: bool) -> None:
    reasoning_text = " The dog ran to the tree and saw the cat." * 2
    reported = (
        f"{'' if is_open else '<think>'}{reasoning_text}</think> Yes. No more. Yes. No more. Yes."
    )
    ids = tokenizer.encode(reported, add_special_tokens=False)
    budget = ReasoningBudget(tokenizer, TAGS, is_open, most)

    model = tiny_of("llama", 1, vocab_size=640)
    options: dict[str, Any] = {
        "processors": [Dictation((*ids,), bonus=1e4), budget],
        "max_tokens": len(ids),
    }
    written = list(generate_tokens(model, [1, 2, 3], **options))
    text = tokenizer.decode(written)
    if most == 100:
        assert written == ids
        return
    before = text.partition("</think>")[0].removeprefix("<think>").rstrip("\n")
    count = len(tokenizer.encode_continuation(before)) if before else 0
    assert abs(count - most) <= 1 and reasoning_text.startswith(before)
    # what follows is the model's again
    closing = tokenizer.encode_continuation("\n</think>\n\n", parse_special=True)
    start = next(n for n in range(len(written)) if written[n : n + len(closing)] == closing)
    assert written[start + len(closing) :] == ids[start + len(closing) :]
    with pytest.raises(ValueError, match="'reasoning_budget' must be at least 0"):
        ReasoningBudget(tokenizer, TAGS, is_open, -1)


def test_chats_tell_reasoning_from_answers(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hm.</think>\n\nYes.", add_special_tokens=False)

    class Script:
        def __init__(self) -> None:
            self.left = [*ids, 517]

        def __call__(self, logits: mx.array) -> mx.array:
            return mx.array([self.left.pop(0) if self.left else 517])

    model = tiny_of("llama", 1, vocab_size=640)
    chat = Chat(model, tokenizer, max_tokens=60, sampler=Script(), reasoning_budget=99)
    parts = [part for response in chat.answer("Is it?") for part in chat.reader.add(response.text)]
    parts += chat.reader.finalize()
    assert "".join(part.text for part in parts if isinstance(part, ThinkingDelta)) == "Hm."
    assert "".join(part.text for part in parts if isinstance(part, TextDelta)) == "Yes."
