"""Text from a prompt: streams, ends and statistics."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation import (
    batch_generate,
    generate,
    generate_tokens,
    make_processors,
    make_sampler,
    prefill,
    stream_generate,
)
from mlx_mmfree.generation.answers.completion import Completion
from mlx_mmfree.hub import Tokenizer, load_tokenizer
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit

PROMPT = "Once upon a time"
GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


def expected_tokens(model: Decoder, tokenizer: Tokenizer, count: int) -> list[int]:
    return list(generate_tokens(model, tokenizer.encode(PROMPT), max_tokens=count))


def test_stream_joins_to_the_decoded_tokens(model: Decoder, tokenizer: Tokenizer) -> None:
    responses = list(stream_generate(model, tokenizer, PROMPT, max_tokens=60))
    tokens = [response.token for response in responses]
    assert tokens == expected_tokens(model, tokenizer, 60)
    assert "".join(response.text for response in responses) == tokenizer.decode(tokens)
    assert generate(model, tokenizer, PROMPT, max_tokens=60) == tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def spaced() -> tuple[Decoder, Tokenizer, int]:
    """A model with a SentencePiece vocabulary, and the token of " the"."""
    tokenizer = load_tokenizer(GOLDENS / "tokenizer_spm")
    mx.random.seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    model = hgrn_bit.build(hgrn_bit.Config(vocab_size=tokenizer.vocab_size, **sizes))
    the = next(n for n in range(640) if tokenizer.id_to_piece(n) == "\N{LOWER ONE EIGHTH BLOCK}the")
    return pack_linears(model), tokenizer, the


class Always:
    """Chooses one token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, logits: mx.array) -> mx.array:
        return mx.full(logits.shape[:1], self.token, mx.uint32)


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("hi", {}, " the the the"),
        ([1, 540], {}, " the the the"),
        # llama2.c: nothing but the BOS token stands before the text
        ([1], {}, "the the the"),
        ("hi", {"is_answer": True}, "the the the"),
        ("hi", {"stop": ["e t"]}, " th"),
        ("hi", {"stop": [" the"]}, ""),
        ("hi", {"stop": [" the the"]}, ""),
    ],
)
def test_the_first_space_of_a_continuation(
    spaced: tuple[Decoder, Tokenizer, int], prompt: Any, options: dict[str, Any], text: str
) -> None:
    """The prompt and the text are one text; a space of its own is not lost."""
    model, tokenizer, the = spaced
    options = {"max_tokens": 3, "sampler": Always(the), **options}
    assert generate(model, tokenizer, prompt, **options) == text
    responses = stream_generate(model, tokenizer, prompt, draft_model=model, **options)
    assert "".join(response.text for response in responses) == text
    assert batch_generate(model, tokenizer, [prompt, "a b c"], **options).texts[0] == text
    if not options.get("stop") and not options.get("is_answer"):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        whole = tokenizer.decode([*ids, the, the, the], skip_special_tokens=True)
        assert whole == tokenizer.decode(ids, skip_special_tokens=True) + text


def test_statistics(model: Decoder, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=3))
    assert [response.generation_tokens for response in responses] == [1, 2, 3]
    assert [response.finish_reason for response in responses] == [None, None, "length"]
    assert {response.prompt_tokens for response in responses} == {len(prompt)}
    last = responses[-1]
    assert last.prompt_tps > 0 and last.generation_tps > 0
    assert last.peak_memory == pytest.approx(mx.get_peak_memory() / 1e9)


def test_end_token_ends_the_text_and_is_not_shown(model: Decoder, tokenizer: Tokenizer) -> None:
    tokens = expected_tokens(model, tokenizer, 20)
    position = next(n for n in range(5, 20) if tokens[n] not in tokens[:n])
    responses = list(stream_generate(model, tokenizer, PROMPT, extra_eos_tokens=[tokens[position]]))
    assert [response.token for response in responses] == tokens[: position + 1]
    assert responses[-1].finish_reason == "stop"
    text = "".join(response.text for response in responses)
    assert text == tokenizer.decode(tokens[:position])


def test_stop_string_ends_the_text(model: Decoder, tokenizer: Tokenizer) -> None:
    text = generate(model, tokenizer, PROMPT, max_tokens=40)
    stop = text[20:24]
    responses = list(stream_generate(model, tokenizer, PROMPT, max_tokens=40, stop=[stop]))
    assert responses[-1].finish_reason == "stop"
    assert "".join(response.text for response in responses) == text[: text.index(stop)]
    assert len(responses) < 40


class Letters:
    """Stands for a tokenizer: token n is the nth chunk of text."""

    def __init__(self, *chunks: str):
        self.chunks = chunks
        self.vocab_size = len(chunks)
        self.eos_token_ids = {0}

    def detokenizer(self, after: Any = ()) -> Any:
        return self

    def add(self, token: int) -> str:
        return self.chunks[token]

    def finalize(self) -> str:
        return "?"


def completed(tokens: list[int], stop: list[str], max_tokens: int = 10) -> Completion:
    completion = Completion(Letters("", "a", "b", "END"), stop, {0}, max_tokens)
    for token in tokens:
        completion.add(token)
    return completion


def test_text_held_back_is_shown_at_the_end() -> None:
    assert completed([1, 2, 0], stop=["bx"]).text == "ab?"
    assert completed([1, 2], stop=["b?!"], max_tokens=2).text == "ab?"


def test_last_characters_can_complete_a_stop_string() -> None:
    completion = completed([1, 2], stop=["b?"], max_tokens=2)
    assert (completion.text, completion.finish_reason) == ("a", "stop")


def test_seed_repeats_the_text(model: Decoder, tokenizer: Tokenizer) -> None:
    def drawn(seed: int) -> str:
        mx.random.seed(seed)
        sampler = make_sampler(temp=1.0, top_k=30)
        return generate(model, tokenizer, PROMPT, max_tokens=20, sampler=sampler)

    assert drawn(1) == drawn(1) != drawn(2)


def test_frequency_penalty_leaves_no_repetition(model: Decoder, tokenizer: Tokenizer) -> None:
    processors = make_processors(frequency_penalty=1e6)
    responses = stream_generate(model, tokenizer, PROMPT, max_tokens=60, processors=processors)
    tokens = [response.token for response in responses]
    assert len(set(tokens)) == len(tokens) == 60
    plain = expected_tokens(model, tokenizer, 60)
    assert len(set(plain)) < 60


def test_continues_from_a_state(model: Decoder, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    state = prefill(model, mx.array([ids[:4]]))
    text = generate(model, tokenizer, ids[4:], state=state, max_tokens=12)
    assert text == generate(model, tokenizer, ids, max_tokens=12)


def test_tokens_without_text_are_never_chosen(tokenizer: Tokenizer) -> None:
    mx.random.seed(0)
    config = hgrn_bit.Config(
        vocab_size=tokenizer.vocab_size + 5000,
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
    )
    model = pack_linears(hgrn_bit.build(config))
    assert max(expected_tokens(model, tokenizer, 20)) >= tokenizer.vocab_size
    responses = stream_generate(model, tokenizer, PROMPT, max_tokens=20)
    assert max(response.token for response in responses) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "'prompt' must not be empty"),
        ([], {}, "'prompt' must not be empty"),
        ([4, 99999], {}, "99999 at position 1"),
        ("\udcff", {}, "surrogate"),
        (PROMPT, {"max_tokens": 0}, "'max_tokens' must be at least 1"),
        (PROMPT, {"stop": [""]}, "'stop' must not hold an empty string"),
        (PROMPT, {"extra_eos_tokens": ["no token"]}, "'extra_eos_token' must be"),
    ],
)
def test_bad_arguments_are_refused_at_once(
    model: Decoder, tokenizer: Tokenizer, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stream_generate(model, tokenizer, prompt, **options)


@pytest.mark.parametrize("max_tokens", [1.5, 20.0, "20", None])
def test_a_bound_that_no_count_meets_is_refused(
    model: Decoder, tokenizer: Tokenizer, max_tokens: Any
) -> None:
    with pytest.raises(TypeError, match="'max_tokens' must be a whole number but got"):
        stream_generate(model, tokenizer, PROMPT, max_tokens=max_tokens)


@pytest.mark.parametrize("sampler", [0.7, None])
def test_a_sampler_that_cannot_be_called_is_refused(
    model: Decoder, tokenizer: Tokenizer, sampler: Any
) -> None:
    with pytest.raises(
        TypeError, match=r"^\[generate\] 'sampler' must be a function, such as make_"
    ):
        generate(model, tokenizer, PROMPT, sampler=sampler)


def test_verbose_prints_text_and_speeds(
    model: Decoder, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = generate(model, tokenizer, "The dog", max_tokens=5)
    assert capsys.readouterr().out == ""
    assert generate(model, tokenizer, "The dog", max_tokens=5, verbose=True) == text
    shown = capsys.readouterr().out
    assert shown.startswith(f"==========\n{text}\n==========\nPrompt: ")
    assert "\nGeneration: 5 tokens, " in shown and shown.endswith(" GB\n")
