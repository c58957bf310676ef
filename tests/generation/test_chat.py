"""Conversations: what is read in each turn, and that it equals reading everything at once."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UsageError
from mlx_mmfree.generation import Chat, generate
from mlx_mmfree.generation.decode import Decoding
from mlx_mmfree.generation.prompts import prompt_tokens
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit, llama
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
BPE, SPM = GOLDENS / "tokenizer_bpe", GOLDENS / "tokenizer_spm"
EOT = 517
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + "
    "CONTENT + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
PLAIN = TURNS.replace("CONTENT", "m.content")
NO_REASONING = TURNS.replace("CONTENT", "m.content.split('</think>')[-1]")
LAST_ONLY = "{{ messages | length }}{{ messages[-1].content }}<|eot_id|>"


def with_template(folder: Path, template: str | None, source: Path = BPE) -> Tokenizer:
    shutil.copytree(source, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return Tokenizer.from_folder(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return with_template(tmp_path / "plain", PLAIN)


@pytest.fixture(params=["recurrent", "attention"])
def model(request: pytest.FixtureRequest) -> Decoder:
    mx.random.seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": 640,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "initializer_range": 0.3,
    }
    if request.param == "recurrent":
        return pack_linears(hgrn_bit.build(hgrn_bit.Config(**sizes)))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return pack_linears(llama.build(llama.Config(**sizes, **heads, linears=TernaryLinears())))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every token that a model reads, in order."""
    # a compiled step is repeated without Python, which could not tell
    mx.disable_compile()
    tokens: list[int] = []
    hidden = Decoder.hidden

    def record(self: Decoder, ids: mx.array, *state: Any, **options: Any) -> Any:
        tokens.extend(ids.flatten().tolist())
        return hidden(self, ids, *state, **options)

    monkeypatch.setattr(Decoder, "hidden", record)
    yield tokens
    mx.enable_compile()


class Script:
    """A sampler that returns what it is given, then token 0."""

    def __init__(self, *texts: list[int]):
        self._tokens: Iterator[int] = iter([token for text in texts for token in text])

    def __call__(self, logits: mx.array) -> mx.array:
        return mx.array([next(self._tokens, 0)])


def reply_to(chat: Chat, question: str) -> str:
    return "".join(response.text for response in chat.answer(question))


def spoken(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode_continuation(text), EOT]


def test_every_token_is_read_once(model: Decoder, tokenizer: Tokenizer, read: list[int]) -> None:
    # decoding runs one token ahead of what it returns
    answers = [[*spoken(tokenizer, text), 9] for text in (" Well met", "Yes", "No")]
    chat = Chat(model, tokenizer, system_prompt="Be kind.", sampler=Script(*answers))
    for question, answer in (("Who?", " Well met"), ("Why <|eot_id|>?", "Yes"), ("So", "No")):
        assert reply_to(chat, question) == answer
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]
    text = tokenizer.apply_chat_template(chat.messages, False, tokenize=False)
    assert tokenizer.decode(read) == text
    assert chat.size == len(read)
    assert read.count(EOT) == 7
    assert (chat.turns, read.count(512)) == (3, 1)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_answers_equal_reading_everything_at_once(
    model: Decoder, tokenizer: Tokenizer, read: list[int], max_tokens: int
) -> None:
    chat = Chat(model, tokenizer, max_tokens=max_tokens, prefill_step_size=5)
    for turn, question in enumerate(["The dog", "is the", "old"]):
        before = len(read)
        *_, last = chat.answer(question)
        answer = chat.messages[-1]["content"]
        unread = 0 if last.finish_reason == "stop" else 1
        prompt = read[: len(read) - last.generation_tokens + unread]
        # the state holds all but the turn's own tokens
        assert len(prompt) - before == last.prompt_tokens
        assert chat.size == len(read) + unread
        everything = list(prompt)
        recorded = list(read)
        assert generate(model, tokenizer, everything, max_tokens=max_tokens) == answer
        read[:] = recorded
        assert chat.turns == turn + 1
    text = tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False)
    assert tokenizer.decode(prompt) == text


def test_an_answer_that_is_stopped_stays_as_shown(
    model: Decoder, tokenizer: Tokenizer, read: list[int]
) -> None:
    answers = [spoken(tokenizer, "one two three four"), [9], [*spoken(tokenizer, "Yes"), 9]]
    chat = Chat(model, tokenizer, sampler=Script(answers[0][:4], *answers[1:]))
    with closing(chat.answer("Count")) as responses:
        shown = "".join(next(responses).text for _ in range(3))
    assert chat.messages[-1] == {"role": "assistant", "content": shown}
    chat.sampler = Script([*spoken(tokenizer, "Yes"), 9])
    assert reply_to(chat, "Go on") == "Yes"
    text = tokenizer.apply_chat_template(chat.messages, False, tokenize=False)
    assert tokenizer.decode(read) == text


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_interrupted_step_loses_nothing(
    model: Decoder,
    tokenizer: Tokenizer,
    read: list[int],
    fails_at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Decoding.step
    countdown = [fails_at]

    def fail(self: Decoding, **options: Any) -> list[int]:
        # the state has changed by now, but the token is not known yet
        token = step(self, **options)
        countdown[0] -= 1
        if countdown[0] == -1:
            raise KeyboardInterrupt
        return token

    chat = Chat(model, tokenizer, max_tokens=6)
    reply_to(chat, "The dog")
    monkeypatch.setattr(Decoding, "step", fail)
    countdown[0] = fails_at
    shown = ""
    with pytest.raises(KeyboardInterrupt):
        for response in chat.answer("is the"):
            shown += response.text
    monkeypatch.setattr(Decoding, "step", step)
    assert chat.turns == 1 + (fails_at > 0)
    if fails_at:
        assert chat.messages[-1]["content"].startswith(shown)
    mark = chat._breakpoints[-1]
    read_before = read[: mark.size - len(mark.unread)]
    read.clear()
    *_, last = chat.answer("old")
    everything = [*read_before, *read[: last.prompt_tokens]]
    text = tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False)
    assert tokenizer.decode(everything) == text
    answer = generate(model, tokenizer, everything, max_tokens=6)
    assert answer == chat.messages[-1]["content"]


def test_rewritten_answers_are_read_from_the_last_question(
    model: Decoder, tmp_path: Path, read: list[int]
) -> None:
    tokenizer = with_template(tmp_path / "reasoning", NO_REASONING)
    answers = [[*spoken(tokenizer, text), 9] for text in ("hm</think>Yes", "No")]
    chat = Chat(model, tokenizer, sampler=Script(*answers))
    reply_to(chat, "Who?")
    question = len(tokenizer.apply_chat_template(chat.messages[:1]))
    assert chat.size == len(read)
    before = len(read)
    *_, last = chat.answer("Why?")
    whole = tokenizer.apply_chat_template(chat.messages[:3])
    assert question + last.prompt_tokens == len(whole)
    assert read[:question] == whole[:question]
    assert read[before : before + last.prompt_tokens] == whole[question:]
    assert chat.size == len(whole) + len(answers[1]) - 1


def test_a_rewritten_conversation_is_read_anew(
    model: Decoder, tmp_path: Path, read: list[int]
) -> None:
    chat = Chat(model, with_template(tmp_path / "last", LAST_ONLY), max_tokens=4)
    reply_to(chat, "one")
    read.clear()
    answer = reply_to(chat, "two")
    ids = chat._tokenizer.apply_chat_template(chat.messages[:3])
    assert read[: len(ids)] == ids
    assert generate(model, chat._tokenizer, ids, max_tokens=4) == answer


@pytest.mark.parametrize("folder", [BPE, SPM], ids=lambda folder: folder.name)
def test_a_conversation_given_as_text_begins_once(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    size = tokenizer.vocab_size
    ids = prompt_tokens(tokenizer, text, size, parse_special=True)
    assert ids == tokenizer.apply_chat_template(messages)
    assert prompt_tokens(tokenizer, "Hello", size) == tokenizer.encode("Hello")
    if folder == BPE:
        assert prompt_tokens(tokenizer, text, 518) == ids


def test_reset(model: Decoder, tokenizer: Tokenizer) -> None:
    chat = Chat(model, tokenizer, system_prompt="Be kind.", max_tokens=5)
    first = reply_to(chat, "The dog")
    assert reply_to(chat, "The dog") != first or chat.turns == 2
    assert chat.state_bytes > 0
    chat.reset()
    assert (chat.turns, chat.size) == (0, 0)
    assert chat.messages == [{"role": "system", "content": "Be kind."}]
    assert reply_to(chat, "The dog") == first


@pytest.mark.parametrize("source", [BPE, SPM], ids=lambda folder: folder.name)
def test_a_base_model_continues_one_text(
    model: Decoder, tmp_path: Path, source: Path, read: list[int]
) -> None:
    tokenizer = with_template(tmp_path / "base", None, source)
    (end,) = tokenizer.eos_token_ids
    words = [tokenizer.encode_continuation(text) for text in (" is old", " and wise")]
    chat = Chat(model, tokenizer, max_tokens=len(words[0]), sampler=Script(words[0]))
    assert not chat.has_template
    assert reply_to(chat, "The dog") == " is old"
    chat.sampler = Script(words[1], [end, 9])
    chat.max_tokens = 50
    reply_to(chat, "but kind")
    first = tokenizer.decode([tokenizer.bos_token_id])
    reported = tokenizer.decode(read).replace(f"{first} ", first)
    assert reported == f"{first}The dog is old but kind and wise" + tokenizer.decode([end])
    turns = chat.messages
    assert [each["content"] for each in turns] == ["The dog", " is old", "but kind", " and wise"]
    read.clear()
    chat.sampler = Script([end, 9])
    reply_to(chat, "The cat")
    assert read[: len(tokenizer.encode("The cat"))] == tokenizer.encode("The cat")
    # the turns of a text that has ended are no part of the next one
    assert [each["content"] for each in chat.messages] == ["The cat", ""]
    read.clear()
    chat.messages, chat.sampler = turns[:2], Script(words[1], [end, 9])
    reply_to(chat, "but kind")
    assert tokenizer.decode(read).replace(f"{first} ", first) == reported
    with pytest.raises(UsageError, match="'system_prompt' must be left out"):
        chat.messages = [{"role": "system", "content": "Be kind."}]


def test_refusals(model: Decoder, tmp_path: Path) -> None:
    base = with_template(tmp_path / "base", None)
    with pytest.raises(UsageError, match="'system_prompt' must be left out"):
        Chat(model, base, system_prompt="Be kind.")
    with pytest.raises(ValueError, match="'text' must not be empty"):
        next(Chat(model, base).answer(""))
    with pytest.raises(ValueError, match="'max_tokens' must be at least 1"):
        Chat(model, base, max_tokens=0)
    refusing = with_template(tmp_path / "refusing", "{{ raise_exception('no') }}")
    chat = Chat(model, refusing)
    with pytest.raises(UsageError, match="refuses the messages: no"):
        next(chat.answer("Hi"))
    assert chat.messages == []
