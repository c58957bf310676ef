"""A model whose embedding has more rows than the tokenizer has tokens writes none of the others."""

import math
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import batch_generate, make_sampler, stream_generate
from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit
from mlx_mmfree.models.hgrn_bit import Config

PROMPT, COUNT = "Once upon a time", 8


@pytest.fixture
def larger(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A model that would write nothing but tokens without a text."""
    mx.random.seed(5)
    size = tokenizer.vocab_size + 24
    config = Config(vocab_size=size, hidden_size=48, num_hidden_layers=2, intermediate_size=80)
    model = pack_linears(hgrn_bit.build(config))
    assert isinstance(model, Decoder)
    liked, plain = mx.where(mx.arange(size) < tokenizer.vocab_size, 0.0, 100.0), model.logits

    def logits(hidden: mx.array) -> mx.array:
        return plain(hidden) + liked

    monkeypatch.setattr(model, "logits", logits)
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", ["alone", "n-grams", "draft model"])
def test_a_stream_has_known_tokens_alone(
    way: str, temperature: float, larger: Decoder, tokenizer: Tokenizer
) -> None:
    drafts = {"n-grams": {"ngram_drafts": True}, "draft model": {"draft_model": larger}}
    options: dict[str, Any] = {"max_tokens": COUNT, "sampler": make_sampler(temp=temperature)}
    options |= drafts.get(way, {})
    tokens = [each.token for each in stream_generate(larger, tokenizer, PROMPT * 3, **options)]
    assert len(tokens) == COUNT and max(tokens) < tokenizer.vocab_size


def test_a_batch_has_known_tokens_alone(larger: Decoder, tokenizer: Tokenizer) -> None:
    found = batch_generate(larger, tokenizer, [PROMPT, "One day"], max_tokens=COUNT).tokens
    assert max(map(max, found)) < tokenizer.vocab_size


def test_log_probabilities_are_those_of_known_tokens(larger: Decoder, tokenizer: Tokenizer) -> None:
    scheduler, known = Scheduler(larger, tokenizer), tokenizer.vocab_size
    scheduler.submit(Request(tokenizer.encode(PROMPT), max_tokens=1, top_logprobs=known))
    events = []
    while scheduler.has_work:
        events += scheduler.step()
    [event] = events
    assert event.logprobs is not None
    assert {token for token, _ in event.logprobs.top} == set(range(known))
    assert math.fsum(math.exp(value) for _, value in event.logprobs.top) == pytest.approx(1)
