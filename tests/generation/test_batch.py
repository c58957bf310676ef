"""A batch gives each row what it gets alone."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.generation import batch_generate, generate_tokens, make_processors, stream_generate
from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.generation.scheduling.prompt_reading import left_padded
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder

PROMPTS = ["Once upon a time", "A", "The little dog ran to the big tree and sat.", "Lily saw"]


def test_left_padding() -> None:
    tokens, valid = left_padded([[1, 2, 3], [4]])
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert valid is not None
    assert valid.tolist() == [[True] * 3, [False, False, True]]
    assert left_padded([[1], [2]])[1] is None


@pytest.mark.sample(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize(
    ("batch_size", "prefill_step_size"), [(1, 2048), (3, 4), (3, 2048), (32, 4)]
)
def test_rows_are_those_of_each_prompt_alone(
    model: Decoder, tokenizer: Tokenizer, batch_size: int, prefill_step_size: int
) -> None:
    response = batch_generate(
        model,
        tokenizer,
        PROMPTS,
        max_tokens=12,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
    )
    for prompt, tokens, text, size in zip(
        PROMPTS, response.tokens, response.texts, response.prompt_tokens, strict=True
    ):
        ids = tokenizer.encode(prompt)
        assert tokens == list(generate_tokens(model, ids, max_tokens=12))
        assert text == tokenizer.decode(tokens)
        assert size == len(ids)
    assert response.finish_reasons == ["length"] * 4


@pytest.mark.equal_bits
def test_logits_are_bit_equal(model: Decoder, tokenizer: Tokenizer) -> None:
    rows = [list(range(n, 2 * n)) for n in range(1, 18)]

    def logits_of(batch: list[list[int]]) -> list[list[np.ndarray]]:
        seen: list[list[np.ndarray]] = [[] for _ in batch]

        def record(logits: mx.array, row: list[np.ndarray]) -> mx.array:
            row.append(np.array(logits))
            return mx.argmax(logits, axis=-1)

        scheduler = Scheduler(model, tokenizer)
        for tokens, row in zip(batch, seen, strict=True):
            scheduler.submit(Request(tokens, max_tokens=4, sampler=partial(record, row=row)))
        while scheduler.has_work:
            scheduler.step()
        return seen

    for row, together in zip(rows, logits_of(rows), strict=True):
        (alone,) = logits_of([row])
        np.testing.assert_array_equal(np.stack(together), np.stack(alone))


def test_rows_end_one_by_one(model: Decoder, tokenizer: Tokenizer) -> None:
    rows = [list(generate_tokens(model, tokenizer.encode(p), max_tokens=12)) for p in PROMPTS]
    ends = {rows[0][3], rows[2][7]}
    response = batch_generate(model, tokenizer, PROMPTS, max_tokens=12, extra_eos_tokens=ends)
    for prompt, tokens, reason in zip(
        PROMPTS, response.tokens, response.finish_reasons, strict=True
    ):
        alone = list(
            stream_generate(model, tokenizer, prompt, max_tokens=12, extra_eos_tokens=ends)
        )
        assert tokens == [step.token for step in alone]
        assert reason == alone[-1].finish_reason
    assert len(response.tokens[0]) <= 4 and len(response.tokens[2]) <= 8


def test_penalties_follow_their_rows(model: Decoder, tokenizer: Tokenizer) -> None:
    processors = make_processors(
        repetition_penalty=3.0, repetition_context_size=6, presence_penalty=2.0
    )
    rows = [list(generate_tokens(model, tokenizer.encode(p), max_tokens=9)) for p in PROMPTS]
    response = batch_generate(
        model,
        tokenizer,
        PROMPTS,
        max_tokens=12,
        processors=processors,
        extra_eos_tokens=[rows[1][2]],
    )
    for prompt, tokens in zip(PROMPTS, response.tokens, strict=True):
        alone = stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=12,
            processors=processors,
            extra_eos_tokens=[rows[1][2]],
        )
        assert tokens == [step.token for step in alone]


def test_statistics_add_up(model: Decoder, tokenizer: Tokenizer) -> None:
    response = batch_generate(model, tokenizer, PROMPTS, max_tokens=5, batch_size=2)
    stats = response.stats
    assert stats.prompt_tokens == sum(response.prompt_tokens)
    assert stats.generation_tokens == 20
    assert stats.prompt_tps == pytest.approx(stats.prompt_tokens / stats.prompt_time)
    # the first tokens of the second pair come beside the last ones of the first, as prompts are read
    assert stats.generation_tps == pytest.approx(14 / stats.generation_time)
    assert stats.peak_memory > 0


def test_no_prompts_give_no_texts(model: Decoder, tokenizer: Tokenizer) -> None:
    assert batch_generate(model, tokenizer, []).texts == []


@pytest.mark.parametrize(
    ("prompts", "batch_size", "message"),
    [
        (["A", ""], 2, "'prompt' must not be empty"),
        ([[1], [2, 1000]], 2, "1000 at position 1"),
        (["A"], 0, "'batch_size' must be at least 1"),
        ("The frog", 2, r"'prompts' must be a list of prompts .* Write \['The frog'\]"),
    ],
)
def test_bad_arguments_are_refused(
    model: Decoder, tokenizer: Tokenizer, prompts: list[str] | str, batch_size: int, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        batch_generate(model, tokenizer, prompts, batch_size=batch_size)


def test_progress_ends_a_batch_where_it_says_so(model: Decoder, tokenizer: Tokenizer) -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    reported: list[tuple[int, int]] = []

    def progress(finished: int, total: int) -> bool:
        reported.append((finished, total))
        return len(reported) < 6

    whole = batch_generate(model, tokenizer, prompts, max_tokens=4, batch_size=2)
    cut = batch_generate(model, tokenizer, prompts, max_tokens=4, batch_size=2, progress=progress)
    assert reported == [(0, 3)] * 3 + [(2, 3)] * 3
    assert (cut.tokens[:2], cut.tokens[2]) == (whole.tokens[:2], whole.tokens[2][:2])
    assert cut.finish_reasons == ["length", "length", None]
    assert cut.stats.generation_tokens == 10
