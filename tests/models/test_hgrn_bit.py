"""The HGRN-bit architecture: configuration, names, formats, padding."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import native
from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit
from mlx_mmfree.ops import use_backend
from tests.tolerances import TOLERANCE, relative_error

SMALL = {
    "model_type": "hgrn_bit",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
}
TOKENS = mx.array([[1, 5, 9, 2, 7, 7, 3]])


def _model(**keys: Any) -> Decoder:
    mx.random.seed(0)
    model = hgrn_bit.build(hgrn_bit.Config.from_hub(SMALL | keys))
    if "lower_bounds" in model:
        model.lower_bounds = mx.random.normal(model.lower_bounds.shape)
    return model


def test_published_sizes() -> None:
    config = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": None,
        "hidden_ratio": 4,
    }
    model = hgrn_bit.build(hgrn_bit.Config.from_hub(config))
    assert model.config.intermediate_size == 2816
    count = sum(value.size for _, value in tree_flatten(model.parameters()))
    assert round(count / 1e6) == 374


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tie_word_embeddings": True},
        {"use_lower_bound": False, "expand_ratio": 2},
        {"use_short_conv": True, "share_conv_kernel": False},
        {"linear_class": "dense"},
        {"linear_class": "dense", "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_config_survives_a_round_trip(keys: dict[str, Any]) -> None:
    config = hgrn_bit.Config.from_hub(SMALL | keys)
    assert hgrn_bit.Config.from_hub(config.to_hub()) == config
    logits, _ = hgrn_bit.build(config)(TOKENS)
    assert logits.shape == (1, 7, 64)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_model_has_equal_logits(tied: bool) -> None:
    model = _model(tie_word_embeddings=tied)
    # a fused backend sums a norm's squares in its own order
    with use_backend("reference"):
        want, _ = model(TOKENS)
        got, _ = pack_linears(model)(TOKENS)
        assert mx.array_equal(got, want)


@pytest.fixture(params=["ternary", "bfloat16"])
def packed(request: pytest.FixtureRequest) -> Decoder:
    """A packed model with a head of one of the kinds that round no row by its neighbours."""
    model = pack_linears(_model())
    if request.param == "bfloat16":
        if reason := native.unavailable():
            pytest.skip(reason)
        model.head = nn.Linear(32, 64, bias=False)
        model.head.set_dtype(mx.bfloat16)
    return model


@pytest.mark.equal_bits
def test_state_carries_over_chunks_bit_for_bit(packed: Decoder) -> None:
    whole, last = packed(TOKENS)
    first, state = packed(TOKENS[:, :3])
    second, state = packed(TOKENS[:, 3:], state)
    assert mx.array_equal(mx.concatenate([first, second], axis=1), whole)
    assert all(mx.array_equal(a.hidden, b.hidden) for a, b in zip(state, last, strict=True))


@pytest.mark.equal_bits
def test_left_padded_row_is_bit_equal_to_the_row_alone(packed: Decoder) -> None:
    tokens = mx.concatenate([mx.zeros((1, 4), mx.int32), TOKENS], axis=1)
    valid = mx.arange(11)[None] >= 4
    other = mx.random.randint(0, 64, (1, 11))
    logits, _ = packed(
        mx.concatenate([other, tokens]), None, mx.concatenate([mx.ones((1, 11), mx.bool_), valid])
    )
    assert mx.array_equal(logits[1:, 4:], packed(TOKENS)[0])


def test_lower_bounds_rise_and_get_gradients() -> None:
    model = _model()
    bounds = [given.get("lower_bound") for given in model.block_arguments()]
    assert bounds[0] is None
    assert (bounds[2] > bounds[1]).all().item()
    table = np.exp(np.array(model.lower_bounds, np.float64))
    shares = table / table.sum(axis=0)
    for n in (1, 2):
        want = mx.array(shares[1 : n + 1].sum(axis=0).astype(np.float32))
        assert relative_error(bounds[n], want) <= TOLERANCE[mx.float32]
    gradient = nn.value_and_grad(model, lambda m: (m(TOKENS)[0] ** 2).sum())(model)[1]
    assert mx.abs(gradient["lower_bounds"]).max().item() > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' must be a whole number"),
        ({"hidden_size": 2.5}, "'hidden_size' must be a whole number"),
        ({"hidden_size": True}, "'hidden_size' must be a whole number"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be a whole number from 1 to 1024"),
        ({"vocab_size": -1}, "'vocab_size' must be a whole number from 1"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number"),
        ({"rms_norm_eps": "1e-6"}, "'rms_norm_eps' must be a number"),
        ({"use_lower_bound": "yes"}, "'use_lower_bound' must be true or false"),
        ({"num_heads": 5}, "'num_heads' must divide the recurrence's 32 dims but got 5"),
    ],
)
def test_bad_values_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        hgrn_bit.Config.from_hub(SMALL | keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu' or 'swish' but got 'gelu'"),
        ({"hidden_act": "x" * 999}, f"'hidden_act' must be 'silu' or 'swish' but got '{'x' * 99}."),
        ({"linear_class": "sparse"}, "'linear_class' must be one of ternary, dense"),
        ({"expand_ratio": 2}, "'expand_ratio' must be 1 with 'use_lower_bound'"),
    ],
)
def test_other_mathematics_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        hgrn_bit.Config.from_hub(SMALL | keys)
