"""Perplexity against a plain computation, token by token."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.evaluation import Perplexity, is_recurrent, measure_perplexity
from mlx_mmfree.evaluation import perplexity as perplexity_module
from mlx_mmfree.models import Decoder, find, hgrn_bit, llama

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "initializer_range": 0.5,
}


class Bigram:
    """A model whose logits depend on the current token only."""

    vocab_size = 11
    context_length = None

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).normal(size=(11, 11)).astype(np.float32)

    def hidden(self, tokens: mx.array, state: Any) -> tuple[mx.array, Any]:
        return mx.array(np.eye(11, dtype=np.float32))[tokens], ()

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden @ mx.array(self.table)


def nats_of(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return -logits[np.arange(len(tokens)), tokens]


def recurrent() -> Decoder:
    mx.random.seed(1)
    return hgrn_bit.build(hgrn_bit.Config(**SIZES))


def transformer() -> Decoder:
    mx.random.seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return llama.build(llama.Config(**SIZES, **heads))


@pytest.mark.parametrize("count", [2, 9, 17, 100])
@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("logits_at_a_time", [11, 50, 2**25])
def test_every_token_but_the_first_counts_once(
    count: int, length: int, logits_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity_module, "LOGITS_AT_A_TIME", logits_at_a_time)
    model = Bigram()
    tokens = np.random.default_rng(count).integers(0, 11, count).astype(np.int32)
    done: list[int] = []
    result = measure_perplexity(
        model, tokens, 50, length=length, batch_size=3, progress=done.append
    )
    nats = nats_of(model.table[tokens[:-1]], tokens[1:])
    assert result.tokens == sum(done) == count - 1
    assert result.nats == pytest.approx(nats.sum(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats.mean()), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / 50, rel=1e-5)
    if count == 2:
        assert math.isnan(result.standard_error)
    else:
        error = math.exp(nats.mean()) * nats.std(ddof=1) / math.sqrt(count - 1)
        assert result.standard_error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": np.array([1])}, "'tokens' must hold at least two ids but holds 1"),
        ({"size_bytes": 0}, "'size_bytes' must be at least 1 but got 0"),
        ({"length": 0}, "'length' must be at least 1 but got 0"),
        ({"batch_size": -1}, "'batch_size' must be at least 1 but got -1"),
    ],
)
def test_values_that_cannot_be_measured_are_refused(values: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tokens": np.array([1, 2, 3]), "size_bytes": 3} | values
    with pytest.raises(ValueError, match=message):
        measure_perplexity(Bigram(), **arguments)


def test_equal_losses_have_no_error() -> None:
    assert (
        Perplexity(nats=0.3 * 7, squared_nats=0.09 * 7, tokens=7, size_bytes=1).standard_error
        < 1e-7
    )


@pytest.mark.equal_bits
@pytest.mark.parametrize("make", [recurrent, transformer])
def test_carried_state_equals_one_pass(make: Any) -> None:
    model = make()
    tokens = np.random.default_rng(0).integers(0, 23, 41).astype(np.int32)
    logits = np.array(model(mx.array(tokens[None, :-1]))[0][0])
    whole = nats_of(logits, tokens[1:]).sum()
    carried = measure_perplexity(model, tokens, 1, length=7, carries_state=True)
    assert carried.nats == pytest.approx(whole, rel=1e-5)
    windows = [tokens[start : start + 8] for start in range(0, 40, 7)]
    alone = sum(
        nats_of(np.array(model(mx.array(row[None, :-1]))[0][0]), row[1:]).sum() for row in windows
    )
    assert abs(alone - whole) > 1e-3 * whole
    assert measure_perplexity(model, tokens, 1, length=7).nats == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("length", [None, 8, 512])
def test_windows_are_as_long_as_the_model_was_made_for(length: int | None) -> None:
    mx.random.seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = llama.build(llama.Config(**SIZES, **heads, max_position_embeddings=8))
    tokens = np.random.default_rng(0).integers(0, 23, 41).astype(np.int32)
    windows = [tokens[start : start + 9] for start in range(0, 40, 8)]
    alone = sum(
        nats_of(np.array(model(mx.array(row[None, :-1]))[0][0]), row[1:]).sum() for row in windows
    )
    measured = measure_perplexity(model, tokens, 1, length=length)
    assert measured.nats == pytest.approx(alone, rel=1e-5)
    assert measured.tokens == 40
    with pytest.raises(ValueError, match="'carries_state' must be False for a text of 40 tokens"):
        measure_perplexity(model, tokens, 1, carries_state=True)
    measure_perplexity(model, tokens[:9], 1, carries_state=True)


def test_recurrences_read_texts_of_any_length() -> None:
    def limit(**keys: Any) -> int | None:
        return (
            find("metaformer")
            .build(
                find("metaformer").config.from_hub(SIZES | {"max_position_embeddings": 8} | keys)
            )
            .context_length
        )

    attention = {"layers": [1], "num_heads": 2}
    keys = SIZES | {"num_heads": 2, "max_position_embeddings": 8}
    gla = find("gla")
    assert gla.build(gla.config.from_hub(keys)).context_length is None
    assert gla.build(gla.config.from_hub(keys | {"attn": attention})).context_length == 8
    assert recurrent().context_length is None
    assert limit(token_mixer="mlgru") is None
    assert limit(token_mixer="mlgru", positions="sinusoidal") == 8
    assert limit(token_mixer="mlgru", positions="learned") == 8
    assert limit(token_mixer=["mlgru", {"name": "gqa", "num_heads": 2}]) == 8
    assert transformer().context_length == 2048
    fnet = find("fnet")
    assert fnet.build(fnet.config.from_hub(dict(fnet.tiny))).context_length == 64


def test_recurrent_models_are_reported_from_attention() -> None:
    assert is_recurrent(recurrent())
    assert not is_recurrent(transformer())
