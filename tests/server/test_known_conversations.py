"""Conversations that come again with an answer: only what is new is read, however the answer ended."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder, llama
from tests.generation.models import Dictation
from tests.server.conftest import CALLING, with_template

pytestmark = pytest.mark.serve

SAID = "The fox and the hen went home."
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "fox"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


@pytest.fixture(scope="module", params=["recurrent", "attention"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, Tokenizer]:
    model, tokenizer = with_template(tmp_path_factory.mktemp("known") / "tokenizer", CALLING)
    if request.param == "attention":
        mx.random.seed(5)
        config = llama.Config(
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            num_attention_heads=2,
            initializer_range=0.3,
        )
        model = llama.build(config)
    return model, tokenizer


Ask = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture
def ask(
    pair: tuple[Decoder, Tokenizer], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ask]:
    """Asks for what is dictated, and returns the choice and the usage."""
    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server import app, chat
    from mlx_mmfree.server.settings import ServedModel

    model, tokenizer = pair
    make = app.text_requests
    dictated: list[str] = []

    def requests(*args: Any, **options: Any) -> list[Any]:
        ids = tokenizer.encode(dictated[-1], add_special_tokens=False, parse_special=True)
        texts = make(*args, **options)
        return [replace(text, processors=[*text.processors, Dictation((*ids,))]) for text in texts]

    for module in (app, chat):
        monkeypatch.setattr(module, "text_requests", requests)
    sessions = Sessions(model, memory_bytes=10**8)
    with start(ServedModel("m", model, tokenizer, sessions)) as client:

        def asked(path: str, written: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            dictated.append(written)
            response = client.post(path, json={"model": "m", "max_tokens": 100, **body})
            assert response.status_code == 200, response.text
            answer = response.json()
            return answer["choices"][0], answer["usage"]

        yield asked


def known(usage: dict[str, Any]) -> int:
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


def ids_of(pair: tuple[Decoder, Tokenizer], text: str) -> Sequence[int]:
    return pair[1].encode(text, add_special_tokens=False, parse_special=True)


@pytest.mark.parametrize(
    ("ending", "options", "reason", "unknown"),
    [
        ("<|eot_id|>", {}, "stop", 0),
        # one token ends the sentence and begins the stop string
        ("\n\n### User: hello", {"stop": "\n\n### User"}, "stop", 1),
        (" zebra crossing", {"stop": " zebra cross"}, "stop", 0),
        # the last token allowed completes the stop string
        (" zebra crossing", {"stop": " zebra cross", "max_tokens": "stop"}, "stop", 0),
        # the last token is read with what follows
        ("", {"max_tokens": None}, "length", 1),
    ],
    ids=["end", "stop", "word", "last", "length"],
)
@pytest.mark.parametrize("dialect", ["completions", "chat"])
def test_an_answer_that_comes_again_is_not_read_again(
    pair: tuple[Decoder, Tokenizer],
    ask: Ask,
    dialect: str,
    ending: str,
    options: dict[str, Any],
    reason: str,
    unknown: int,
) -> None:
    if options.get("max_tokens") == "stop":
        ids = ids_of(pair, SAID + ending)
        counts = range(len(ids) + 1)
        enough = next(n for n in counts if options["stop"] in pair[1].decode(list(ids[:n])))
        options = options | {"max_tokens": enough}
    elif "max_tokens" in options:
        options = {"max_tokens": len(ids_of(pair, SAID))}
    if dialect == "completions":
        prompt = "Where did they go?"
        choice, first = ask("/v1/completions", SAID + ending, prompt=prompt, **options)
        text = choice["text"]
        _, usage = ask("/v1/completions", SAID, prompt=f"{prompt}{text} And then?")
    else:
        path, messages = "/v1/chat/completions", [{"role": "user", "content": "Where did they go?"}]
        choice, first = ask(path, SAID + ending, messages=messages, **options)
        text = choice["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
        _, usage = ask(path, SAID, messages=messages)
    assert text == SAID and choice["finish_reason"] == reason
    assert known(usage) == first["prompt_tokens"] + len(ids_of(pair, SAID)) - unknown


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_come_again_are_not_read_again(
    pair: tuple[Decoder, Tokenizer], ask: Ask, parallel: bool
) -> None:
    path, messages = "/v1/chat/completions", [{"role": "user", "content": "What is a fox?"}]
    options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": parallel}
    choice, first = ask(path, f"{CALL}<|eot_id|>", messages=messages, **options)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "an animal"}
    _, usage = ask(path, SAID, messages=[*messages, answer, result], **options)
    # with at most one call, its last tag ends the text
    written = CALL if parallel else CALL.removesuffix("</tool_call>")
    assert first["prompt_tokens"] + len(ids_of(pair, written)) - known(usage) <= (not parallel)
