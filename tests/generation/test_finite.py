"""A model whose numbers are not finite is stopped, whoever asks it for tokens or probabilities."""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import embed_tokens
from mlx_mmfree.errors import NumericalError
from mlx_mmfree.evaluation.perplexity import measure_perplexity, score_continuations
from mlx_mmfree.generation.decode import Decoding, generate_tokens
from mlx_mmfree.generation.finite_logits import are_finite
from mlx_mmfree.generation.speculative import SpeculativeDecoding
from mlx_mmfree.models import Decoder
from tests.generation.models import MODELS

PROMPT = [3, 1, 4]
USES: dict[str, Callable[[Decoder], object]] = {
    "generate": lambda model: list(generate_tokens(model, PROMPT, max_tokens=3)),
    "batch": lambda model: Decoding(model, mx.array([PROMPT, PROMPT])).step(),
    "draft": lambda model: SpeculativeDecoding(model, model, mx.array([PROMPT])).step(),
    "perplexity": lambda model: measure_perplexity(model, np.array(PROMPT), 3),
    "score": lambda model: score_continuations(model, [(PROMPT, [1, 5])]),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return MODELS[request.param](3)


def test_vectors_that_are_not_finite_are_named(model: Decoder) -> None:
    model.norm.weight = mx.full(model.norm.weight.shape, math.nan)
    with pytest.raises(NumericalError, match="hidden states must be finite"):
        embed_tokens(model, mx.array([PROMPT]))


# all uses must look at the same logits
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("use", "value"), [*((use, math.nan) for use in USES), ("batch", math.inf), ("batch", 3e38)]
)
def test_damaged_weights_are_named(model: Decoder, use: str, value: float) -> None:
    model.norm.weight = mx.full(model.norm.weight.shape, value)
    with pytest.raises(NumericalError, match="logits must be finite but hold NaN or infinity"):
        USES[use](model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", USES)
def test_weights_whose_squares_overflow_are_named(model: Decoder, use: str) -> None:
    model.embed.weight = mx.full(model.embed.weight.shape, 3e38)
    with pytest.raises(
        NumericalError, match="are all zero because a number before them overflowed"
    ):
        USES[use](model)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_a_large_vocabulary_of_any_float_type_is_finite(dtype: mx.Dtype) -> None:
    logits = mx.full((2, 2**16), 9.0, dtype)
    assert are_finite(logits).all().item()
    logits[1, -1] = -math.inf
    assert not are_finite(logits).all().item()


@pytest.mark.sample(2)
def test_every_step_is_looked_at(model: Decoder) -> None:
    expected = list(generate_tokens(model, PROMPT, max_tokens=20))
    index = next(n for n, token in enumerate(expected) if token not in [*PROMPT, *expected[:2]])
    weight = model.embed.weight
    model.embed.weight = mx.where(
        mx.arange(len(weight))[:, None] == expected[index], mx.nan, weight
    )
    # the head is a matrix of its own, so that the token can be chosen before it is read
    found = []
    with pytest.raises(NumericalError):
        for token in generate_tokens(model, PROMPT, max_tokens=20):
            found.append(token)
    assert found == expected[: index + 1]
