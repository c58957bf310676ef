"""Conversations that come again with an answer: only what is new is read, however the answer ended."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.generation.scheduling.drafting import NgramDrafting
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder, llama
from tests.generation.models import Dictation
from tests.server.conftest import CALLING, with_template

pytestmark = pytest.mark.serve

ANSWER = "The fox and the hen went home."
THINKING = CALLING.replace(
    "+ m.content }}",
    "}}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}",
)
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
        ids = ids_of(pair, ANSWER + ending)
        counts = range(len(ids) + 1)
        enough = next(n for n in counts if options["stop"] in pair[1].decode(list(ids[:n])))
        options = options | {"max_tokens": enough}
    elif "max_tokens" in options:
        options = {"max_tokens": len(ids_of(pair, ANSWER))}
    if dialect == "completions":
        prompt = "Where did they go?"
        choice, first = ask("/v1/completions", ANSWER + ending, prompt=prompt, **options)
        text = choice["text"]
        _, usage = ask("/v1/completions", ANSWER, prompt=f"{prompt}{text} And then?")
    else:
        path, messages = "/v1/chat/completions", [{"role": "user", "content": "Where did they go?"}]
        choice, first = ask(path, ANSWER + ending, messages=messages, **options)
        text = choice["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
        _, usage = ask(path, ANSWER, messages=messages)
    assert text == ANSWER and choice["finish_reason"] == reason
    assert known(usage) == first["prompt_tokens"] + len(ids_of(pair, ANSWER)) - unknown


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
    _, usage = ask(path, ANSWER, messages=[*messages, answer, result], **options)
    # with at most one call, its last tag ends the text
    written = CALL if parallel else CALL.removesuffix("</tool_call>")
    assert first["prompt_tokens"] + len(ids_of(pair, written)) - known(usage) <= (not parallel)


def turn_of_messages(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer of /v1/messages and what follows it."""
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "an animal"} for call in calls
    ]
    reply = {"role": "assistant", "content": answer["content"]}
    return [reply, {"role": "user", "content": results or "And?"}]


ENDINGS = {
    "stop": (f"{ANSWER}<|eot_id|>", 100, 0),
    # the last token is read with what follows
    "length": (ANSWER, None, 1),
    "call": (f"{CALL}<|eot_id|>", 100, 0),
    "reasoning": (f"<think>Hm.</think>{ANSWER}<|eot_id|>", 100, 0),
    "reasoning and call": (f"<think>Hm.</think>{CALL}<|eot_id|>", 100, 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_agents_conversations_are_not_read_again(
    pair: tuple[Decoder, Tokenizer], ask_agents: Ask, ending: str
) -> None:
    written, most, unknown = ENDINGS[ending]
    known_of_both = []
    shown = written.removesuffix("<|eot_id|>")
    count = len(ids_of(pair, shown))
    tool = {"name": "look_up", "input_schema": {}}
    question = [{"role": "user", "content": "What is a fox?"}]
    options: dict[str, Any] = {"max_tokens": most or count, "tools": [tool]}
    answer, first = ask_agents("/v1/messages", written, messages=question, **options)
    messages = [*question, *turn_of_messages(answer)]
    _, usage = ask_agents("/v1/messages", ANSWER, messages=messages, **options)
    known_of_both.append(usage["cache_read_input_tokens"])
    read = first["input_tokens"] + first["cache_read_input_tokens"]

    tool = {"type": "function", "name": "look_up", "parameters": {}}
    options = {"max_output_tokens": most or count, "tools": [tool]}
    answer, _ = ask_agents("/v1/responses", written, input="What is a hen?", **options)
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "an animal"}
        for call in calls
    ]
    _, usage = ask_agents(
        "/v1/responses",
        ANSWER,
        input=results or "And?",
        previous_response_id=answer["id"],
        **options,
    )
    known_of_both.append(usage["input_tokens_details"]["cached_tokens"])
    hen = answer["usage"]["input_tokens"]
    assert known_of_both == [read + count - unknown, hen + count - unknown]


@pytest.fixture
def ask_agents(
    tmp_path_factory: pytest.TempPathFactory,
    pair: tuple[Decoder, Tokenizer],
    start: Callable[..., Any],
) -> Iterator[Ask]:
    """Like `ask`, of a model whose template writes reasoning as the model does."""
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.stand_in import dictate

    _, tokenizer = with_template(tmp_path_factory.mktemp("agents") / "m", THINKING)
    model, reply = pair[0], [""]
    sessions = Sessions(model, memory_bytes=10**8)
    served = ServedModel("m", model, tokenizer, sessions)
    with start(served) as client, dictate(lambda _: reply[0], "m"):

        def asked(path: str, written: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            reply[0] = written
            response = client.post(path, json={"model": "m", **body})
            assert response.status_code == 200, response.text
            return response.json(), response.json()["usage"]

        yield asked


@pytest.mark.parametrize("ending", ["length", "stop string", "end"])
def test_what_was_drafted_is_not_read_again(
    pair: tuple[Decoder, Tokenizer], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = pair
    steps: list[int] = []
    step = NgramDrafting.step

    def counted(self: NgramDrafting, row: Any) -> list[int]:
        tokens = step(self, row)
        steps.append(len(tokens))
        return tokens

    monkeypatch.setattr(NgramDrafting, "step", counted)
    prompt = list(ids_of(pair, "The fox" + " and the fox" * 3))

    def written(left: list[int] | None = None, **options: Any) -> tuple[list[int], int]:
        """The tokens of a text, and how many are known of what is left of it after its prompt."""
        sessions = Sessions(model, memory_bytes=10**8)
        scheduler = Scheduler(model, tokenizer, sessions=sessions, ngram_drafts=True)
        scheduler.submit(Request(prompt, max_tokens=40, **options))
        tokens: list[int] = []
        while scheduler.has_work:
            tokens += [event.token for event in scheduler.step() if event.token is not None]
        scheduler.close()
        left = tokens if left is None else left
        return tokens, sessions.find([*prompt, *left, 1]).count

    tokens, known = written()
    assert len(tokens) == 40 and len(steps) > 20
    if ending == "length":
        assert known == len(prompt) + 39
        return
    # the first token that none before it equals, late in the text
    index = next(n for n in range(20, 40) if tokens[n] not in tokens[:n])
    if ending == "end":
        again, known = written(end=[tokens[index]])
        assert again == tokens[: index + 1] and known == len(prompt) + index
        return
    # a stop string of three tokens, of which the text keeps none
    stops = {n: tokenizer.decode(tokens[n : n + 3]) for n in range(5, 37)}
    index, stop = next(
        (n, stop)
        for n, stop in stops.items()
        if stop.isascii() and stop not in tokenizer.decode(tokens[: n + 2])
    )
    again, known = written(stop=[stop], left=tokens[:index])
    assert again == tokens[: index + 3]
    assert known == len(prompt) + index
