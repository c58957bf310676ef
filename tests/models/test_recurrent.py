"""HGRN, HGRN2, GLA, RetNet and the delta rule: published sizes, configurations, states, what is refused.

What they compute is compared with flash-linear-attention in `goldens`.
"""

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, MMFreeError, UnsupportedModelError
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops.backend.dispatch import use_plain_operations
from mlx_mmfree.token_mixers import GQA
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

KINDS = ("hgrn", "hgrn2", "gla", "retnet")
DELTA_RULES = ("delta_net", "gated_deltanet", "kda")
NEW = (*DELTA_RULES, "rwkv7", "mamba2")
HYBRID = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 3}
TOKENS = mx.array([[1, 5, 9, 2, 7, 7, 3]])


def config_of(kind: str, **keys: Any) -> Any:
    architecture = find(kind)
    return architecture.config.from_hub({**architecture.tiny, **keys})


def build(kind: str, **keys: Any) -> Decoder:
    mx.random.seed(1)
    model: Decoder = find(kind).build(config_of(kind, initializer_range=0.3, **keys))
    return model


def test_published_sizes() -> None:
    """`fla-hub/*-1.3B-100B`: what their configurations say are the defaults."""
    for kind in KINDS:
        model = find(kind).build(find(kind).config.from_hub({}))
        count = sum(value.size for _, value in tree_flatten(model.parameters()))
        assert 1.3e9 < count < 1.4e9
        if kind == "retnet":
            assert count == 1_351_727_104


@pytest.mark.parametrize("kind", [*KINDS, *DELTA_RULES])
@pytest.mark.parametrize("attn", [None, HYBRID, [HYBRID, HYBRID | {"layers": [0]}]], ids=str)
def test_config_survives_a_round_trip(kind: str, attn: Any) -> None:
    config = config_of(kind, attn=attn, tie_word_embeddings=attn is None, norm_eps=1e-5)
    assert find(kind).config.from_hub(config.to_hub()) == config
    model = find(kind).build(config)
    attention = [isinstance(block.token_mixer, GQA) for block in model.blocks]
    assert attention.count(True) == len(config.attn)


@pytest.mark.parametrize("kind", [*KINDS, *DELTA_RULES])
@pytest.mark.parametrize("attn", [None, HYBRID], ids=["plain", "hybrid"])
def test_whole_is_chunks(kind: str, attn: Any) -> None:
    model = build(kind, attn=attn, num_hidden_layers=3)
    whole, _ = model(TOKENS)
    state, parts = None, []
    for n in (0, 3, 4, 5):
        end = {0: 3, 5: 7}.get(n, n + 1)
        logits, state = model(TOKENS[:, n:end], state)
        parts.append(logits)
    chunks = mx.concatenate(parts, axis=1)
    assert relative_error(chunks, whole) <= TOLERANCE[mx.float32]


def test_bounds_are_of_blocks_with_gates() -> None:
    model = build("hgrn2", attn=HYBRID, num_hidden_layers=3)
    model.lower_bounds = mx.random.normal(model.lower_bounds.shape)
    given = [list(each) for each in model.block_arguments()]
    assert given == [[], [], ["lower_bound"]]
    assert mx.allclose(model.bounds()[2], mx.softmax(model.lower_bounds, axis=0)[1:].sum(axis=0))


def test_heads_may_be_given_in_place_of_their_dims() -> None:
    assert config_of("hgrn2", expand_ratio=None, num_heads=4).expand_ratio == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_act": "powlu"},
        {"use_short_conv": True},
        {"attnres_block_size": 4},
        {"elementwise_affine": False},
    ],
    ids=str,
)
def test_other_mathematics_is_refused(kind: str, keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(keys))):
        config_of(kind, **keys)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gla", {"num_kv_heads": 1}),
        ("gla", {"feature_map": "relu"}),
        ("gla", {"use_output_gate": False}),
        ("gla", {"clamp_min": -1.0}),
        ("gla", {"use_gk": False}),
        ("retnet", {"num_kv_heads": 1}),
        ("retnet", {"feature_map": "elu"}),
        ("delta_net", {"qk_norm": "sum"}),
        ("delta_net", {"qk_activation": "elu"}),
        ("delta_net", {"use_beta": False}),
        ("gated_deltanet", {"use_gate": False}),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}),
        ("rwkv7", {"norm_first": False}),
        ("rwkv7", {"attn": HYBRID}),
        ("mamba2", {"norm_before_gate": True}),
        ("mamba2", {"expand": 3}),
    ],
    ids=str,
)
def test_other_mathematics_of_a_mixer_is_refused(kind: str, keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(keys))):
        config_of(kind, **keys)


def test_mamba2_describes_what_follows_from_its_sizes() -> None:
    written = config_of("mamba2", hidden_size=40, num_heads=10, head_dim=8).to_hub()
    assert written["expand"] == 2
    assert written["intermediate_size"] == 80
    # of 40 / 16, rounded up
    assert written["time_step_rank"] == 3
    assert config_of("mamba2", expand=None) == config_of("mamba2")


@pytest.mark.parametrize("kind", DELTA_RULES)
@pytest.mark.parametrize("keys", [{"use_short_conv": False}, {"attnres_block_size": 4}], ids=str)
def test_other_mathematics_of_delta_rules_is_refused(kind: str, keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(keys))):
        config_of(kind, **keys)


@pytest.mark.parametrize(
    ("kind", "keys", "named"),
    [
        ("hgrn2", {"expand_ratio": 5}, "expand_ratio"),
        ("gla", {"num_heads": 3}, "expand_k"),
        ("retnet", {"expand_v": 0.001}, "expand_v"),
        ("delta_net", {"num_heads": 3}, "expand_k"),
        ("gated_deltanet", {"num_v_heads": 3}, "num_v_heads"),
        ("gated_deltanet", {"expand_v": 1.01}, "expand_v"),
        ("kda", {"lower_bound": 1.0}, "lower_bound"),
        ("rwkv7", {"head_dim": 5}, "head_dim"),
        ("rwkv7", {"value_dim": [32, 16]}, "value_dim"),
        ("mamba2", {"n_groups": 3}, "n_groups"),
        ("mamba2", {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit"),
        ("hgrn", {"attn": [3]}, "attn"),
        ("hgrn", {"attn": HYBRID | {"layers": [2]}}, "layers"),
        ("hgrn", {"attn": [HYBRID, HYBRID]}, "layers"),
        ("hgrn", {"attn": HYBRID | {"num_heads": 3}}, "num_heads"),
        ("hgrn", {"attn": HYBRID | {"num_kv_heads": 3}}, "num_kv_heads"),
    ],
)
def test_damaged_configurations_name_the_key(kind: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        config_of(kind, **keys)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [*KINDS, *NEW])
def test_hostile_configurations(kind: str) -> None:
    rng = random.Random(0)
    values: list[Any] = [None, -1, 0, 2**40, 1.5, "x", [], {}, True, 10**30, float("nan")]
    keys = [*config_of(kind).to_hub(), "hidden_ratio", "num_kv_heads", "rms_norm_eps"]
    for _ in range(300):
        changed = {rng.choice(keys): rng.choice(values) for _ in range(2)}
        try:
            config = config_of(kind, **changed)
        except MMFreeError as error:
            assert "\n" not in str(error)
        else:
            assert find(kind).config.from_hub(config.to_hub()) == config


@pytest.mark.parametrize("kind", NEW)
def test_padding_and_samples_of_a_row_change_nothing(kind: str) -> None:
    model = build(kind)
    alone = [model(tokens)[0] for tokens in (TOKENS, TOKENS[:, 2:])]
    padded = mx.concatenate([mx.zeros((1, 2), TOKENS.dtype), TOKENS[:, 2:]], axis=1)
    valid = mx.array([[True] * 7, [False] * 2 + [True] * 5])
    both, state = model(mx.concatenate([TOKENS, padded]), None, valid)
    assert relative_error(both[:1], alone[0]) <= TOLERANCE[mx.float32]
    assert relative_error(both[1:, 2:], alone[1]) <= TOLERANCE[mx.float32]
    later, _ = model(mx.array([[4], [4]]), state)
    want, _ = model(mx.concatenate([TOKENS[:, 2:], mx.array([[4]])], axis=1))
    assert relative_error(later[1], want[0, -1:]) <= TOLERANCE[mx.float32]
    starts = mx.array([[n in (0, 7) for n in range(12)]])
    packed, _ = model(mx.concatenate([TOKENS, TOKENS[:, 2:]], axis=1), starts=starts)
    assert relative_error(packed, mx.concatenate(alone, axis=1)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("kind", NEW)
def test_states_after_each_token_are_those_of_fewer_tokens(kind: str) -> None:
    model = build(kind)
    _, states = model.hidden(TOKENS, by_position=True)
    for count in (1, 4, 7):
        _, want = model.hidden(TOKENS[:, :count])
        got = [each.states[count - 1] for each in states]
        for (_, g), (_, w) in zip(tree_flatten(got), tree_flatten(list(want)), strict=True):
            assert relative_error(g, w) <= TOLERANCE[mx.float32]


@pytest.mark.usefixtures("unfused")
def test_its_gradient_can_be_compiled_without_kernels() -> None:
    model = build("rwkv7")

    def loss(parameters: Any, tokens: mx.array) -> mx.array:
        model.update(parameters)
        return model(tokens)[0].square().mean()

    gradient, parameters = mx.grad(loss), model.trainable_parameters()
    with use_plain_operations():
        want = tree_flatten(gradient(parameters, TOKENS))
        got = tree_flatten(mx.compile(gradient)(parameters, TOKENS))
    for (_, g), (_, w) in zip(got, want, strict=True):
        assert relative_error(g, w) <= GRADIENT_TOLERANCE


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", NEW)
def test_it_learns_a_text(kind: str) -> None:
    model = build(kind)

    def loss_of(model: Decoder) -> mx.array:
        return nn.losses.cross_entropy(model(TOKENS[:, :-1])[0], TOKENS[:, 1:], reduction="mean")

    optimizer, losses = AdamW(learning_rate=1e-2), []
    for _ in range(15):
        loss, gradients = nn.value_and_grad(model, loss_of)(model)
        optimizer.update(model, gradients)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for name, gradient in tree_flatten(gradients):
        assert mx.isfinite(gradient).all().item(), name
