"""Completions, whole and streamed, and every parameter that changes them."""

import base64
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import embed, generate, load, make_processors
from mlx_mmfree.generation.scheduling import Event, Request, TokenLogprobs
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit
from mlx_mmfree.server.answers import CompletionAnswer, ShownTokens
from mlx_mmfree.server.schemas import StreamOptions
from mlx_mmfree.server.settings import ServedModel
from tests.hub.embedder_folder import embedder_folder
from tests.server.conftest import GOLDENS, stream

pytestmark = pytest.mark.serve

PROMPT = "Once upon a time"


def complete(client: Any, **body: Any) -> dict[str, Any]:
    """The answer to a completion of the prompt, greedy unless the body says otherwise."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | body
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(client: Any, **body: Any) -> str:
    (choice,) = complete(client, **body)["choices"]
    return str(choice["text"])


def test_a_text_is_that_of_generate(client: Any, demo_model: tuple[Decoder, Tokenizer]) -> None:
    answer = complete(client)
    (choice,) = answer["choices"]
    assert choice["text"] == generate(*demo_model, PROMPT, max_tokens=12)
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["object"] == "text_completion" and answer["model"] == "demo"
    prompt = len(demo_model[1].encode(PROMPT))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 12)
    assert usage["total_tokens"] == prompt + 12


def test_a_stream_is_the_same_text(client: Any) -> None:
    chunks = stream(client, prompt=PROMPT, stream_options={"include_usage": True})
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == text_of(client)
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in stream(client, prompt=PROMPT))
    each = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk["usage"] for chunk in stream(client, prompt=PROMPT, stream_options=each)]
    numbers = [usage["completion_tokens"] for usage in usages]
    # texts that wait for a slow reader come as one chunk, so that the number of chunks may differ
    assert len(numbers) > 1 and numbers == sorted(numbers) and numbers[-1] == 12
    assert usages[0]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]


def test_prompts_come_in_every_format(client: Any, demo_model: tuple[Decoder, Tokenizer]) -> None:
    ids = demo_model[1].encode(PROMPT)
    want = text_of(client)
    assert text_of(client, prompt=ids) == want
    assert text_of(client, prompt=[PROMPT]) == want
    several = complete(client, prompt=[ids, demo_model[1].encode("The cat")], n=2)
    texts = [choice["text"] for choice in several["choices"]]
    assert texts[0] == texts[1] == want and texts[2] == texts[3] != want
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == len(ids) + len(demo_model[1].encode("The cat"))


def test_stop_strings_are_not_shown(client: Any) -> None:
    whole = text_of(client)
    word = whole.split()[2]
    answer = complete(client, stop=[word, "never"])
    (choice,) = answer["choices"]
    assert choice["text"] == whole[: whole.index(word)]
    assert choice["finish_reason"] == "stop"
    assert text_of(client, stop=word) == choice["text"]


def test_a_seed_repeats_a_text_and_n_draws_others(client: Any) -> None:
    drawn = {"temperature": 1.5, "seed": 3}
    assert text_of(client, **drawn) == text_of(client, **drawn)
    texts = [choice["text"] for choice in complete(client, n=4, **drawn)["choices"]]
    assert texts[0] == text_of(client, **drawn)
    assert len(set(texts)) > 1
    assert text_of(client, temperature=1.5, seed=-1) == text_of(client, temperature=1.5, seed=-1)


def test_penalties_are_those_of_the_library(
    client: Any, demo_model: tuple[Decoder, Tokenizer]
) -> None:
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    want = generate(*demo_model, PROMPT, max_tokens=12, processors=make_processors(**penalties))
    assert text_of(client, **penalties) == want != text_of(client)


def test_a_bias_forces_and_forbids_tokens(
    client: Any, demo_model: tuple[Decoder, Tokenizer]
) -> None:
    token = demo_model[1].encode(" dog", add_special_tokens=False)[-1]
    part = demo_model[1].token_bytes(token).decode()
    assert text_of(client, logit_bias={str(token): 100}, max_tokens=3) == 3 * part
    first = text_of(client, max_tokens=1)
    ids = demo_model[1].encode(PROMPT + first)
    assert text_of(client, max_tokens=1, logit_bias={str(ids[-1]): -100}) != first


def test_log_probabilities_are_those_of_the_model(
    client: Any, demo_model: tuple[Decoder, Tokenizer]
) -> None:
    model, tokenizer = demo_model
    (choice,) = complete(client, logprobs=3, max_tokens=4)["choices"]
    shown = choice["logprobs"]
    assert "".join(shown["tokens"]) == choice["text"]
    offsets = np.cumsum([0, *map(len, shown["tokens"])])[:-1].tolist()
    assert shown["text_offset"] == offsets
    logits, _ = model(mx.array([tokenizer.encode(PROMPT)]))
    row = np.array(logits[0, -1].astype(mx.float32), np.float64)
    want = row - row.max() - np.log(np.exp(row - row.max()).sum())
    assert shown["token_logprobs"][0] == pytest.approx(want.max(), abs=1e-4)
    assert list(shown["top_logprobs"][0].values()) == pytest.approx(
        sorted(want, reverse=True)[:3], abs=1e-4
    )
    streamed = stream(client, prompt=PROMPT, logprobs=3, max_tokens=4)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [token for part in parts if part for token in part["tokens"]] == shown["tokens"]
    assert complete(client, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"][0] == {}


def test_offsets_point_into_the_text(start: Callable[..., Any]) -> None:
    """With SentencePiece, whose first space belongs to the text, and characters of several tokens."""
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_spm")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    model = pack_linears(hgrn_bit.build(hgrn_bit.Config(vocab_size=tokenizer.vocab_size, **sizes)))
    ids = {tokenizer.id_to_piece(n): str(n) for n in range(tokenizer.vocab_size)}
    with start(ServedModel("spm", model, tokenizer)) as client:
        the = {"model": "spm", "prompt": "hi", "logprobs": 1, "logit_bias": {ids["▁the"]: 100}}
        (choice,) = complete(client, **the, max_tokens=3)["choices"]
        assert choice["text"] == " the the the"
        assert choice["logprobs"]["tokens"] == [" the"] * 3
        assert choice["logprobs"]["text_offset"] == [0, 4, 8]
        (choice,) = complete(client, **the | {"prompt": [1]}, max_tokens=2)["choices"]
        assert choice["text"] == "the the"
        assert choice["logprobs"]["tokens"] == ["the", " the"]
        assert choice["logprobs"]["text_offset"] == [0, 3]
        assert complete(client, **the, stop=[" the"])["choices"][0]["text"] == ""
        message = {"role": "user", "content": "hi"}
        body = {"model": "spm", "messages": [message], "logit_bias": the["logit_bias"]}
        response = client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
        assert response.json()["choices"][0]["message"]["content"] == "the the"
        streamed = stream(client, **the, max_tokens=3)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == " the the the"
    # three bytes are one character
    shown = ShownTokens(tokenizer, end=())
    answer = CompletionAnswer("spm", [Request(tokenizer.encode("hi"))], 1, shown, StreamOptions())
    parts = ["<0xE6>", "<0x9D>", "<0xB1>", "▁the"]
    for token in (int(ids[part]) for part in parts):
        answer.add([(0, Event(0, "", token, TokenLogprobs(token, 0.0), None, 2, 0))])
    assert next(answer.whole()["choices"])["logprobs"]["text_offset"] == [0, 0, 0, 1]


def test_the_end_of_a_text_is_no_shown_token(client: Any) -> None:
    (choice,) = complete(client, logprobs=1, logit_bias={"0": 100})["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == []


def test_the_logarithm_of_zero_can_be_written(demo_model: tuple[Decoder, Tokenizer]) -> None:
    shown = ShownTokens(demo_model[1], end=())
    assert [shown.number(value) for value in (-math.inf, -0.5)] == [-9999.0, -0.5]


def test_a_known_prefix_is_not_read_again(client: Any) -> None:
    text = PROMPT + " there was a fox that nobody had seen before, and"
    complete(client, prompt=text)
    usage = complete(client, prompt=text + " it ran")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.7 * usage["prompt_tokens"]


def test_embeddings_are_means_of_hidden_states(
    start: Callable[..., Any], demo_model: tuple[Decoder, Tokenizer]
) -> None:
    model, tokenizer = demo_model
    # read in chunks
    with start(prefill_step_size=2) as client:
        body = {"input": [PROMPT, "The cat"], "model": "demo"}
        answer = client.post("/v1/embeddings", json=body).json()
        coded = client.post(
            "/v1/embeddings", json={"input": PROMPT, "encoding_format": "base64"}
        ).json()
    hidden, _ = model.hidden(mx.array([tokenizer.encode(PROMPT)]))
    mean = np.array(hidden.astype(mx.float32), np.float64)[0].mean(axis=0)
    want = mean / np.linalg.norm(mean)
    first, second = (np.array(entry["embedding"]) for entry in answer["data"])
    assert np.abs(first - want).max() < 1e-6
    assert np.linalg.norm(second) == pytest.approx(1, abs=1e-6) and abs(first @ second) < 1
    count = sum(len(tokenizer.encode(text)) for text in (PROMPT, "The cat"))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    (entry,) = coded["data"]
    raw = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    assert np.array_equal(raw, first.astype(np.float32))


def test_a_model_that_embeds_texts_is_asked_as_its_files_say(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    folder = embedder_folder(tmp_path / "model", pooling="lasttoken", max_length=40)
    model, tokenizer = load(folder)
    with start(ServedModel("m", model, tokenizer)) as client:

        def vectors(**body: Any) -> mx.array:
            answer = client.post("/v1/embeddings", json={"model": "m"} | body)
            assert answer.status_code == 200, answer.text
            return mx.array([entry["embedding"] for entry in answer.json()["data"]])

        texts = [PROMPT, "No."]
        assert mx.allclose(vectors(input=texts), embed(model, tokenizer, texts), atol=1e-6)
        asked = vectors(input=texts, prompt_name="query")
        assert mx.allclose(asked, embed(model, tokenizer, texts, prompt_name="query"), atol=1e-6)
        ids = list(map(tokenizer.encode, texts))
        assert mx.allclose(vectors(input=ids), embed(model, tokenizer, texts), atol=1e-6)
        for body, status, param in (
            ({"input": "a", "prompt_name": "passage"}, 400, "prompt_name"),
            ({"input": [[5, 6]], "prompt_name": "query"}, 400, "prompt_name"),
            ({"input": [41 * [5]]}, 413, "input"),
        ):
            answer = client.post("/v1/embeddings", json={"model": "m"} | body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        for address, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            error = client.post(address, json={"model": "m"} | body).json()["error"]
            assert error["code"] == "unsupported_model" and "/v1/embeddings" in error["message"]
