"""Rotary positions of configurations: every scaling, against transformers where it is installed."""

import math
from copy import copy
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.layers import RoPE
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.token_mixers import GQA, AttentionNorms
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
}


def config_of(model_type: str = "llama", **keys: Any) -> Any:
    return find(model_type).config.from_hub(SMALL | keys)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    # as published: a blended frequency is exact to a float32 number, which positions multiply
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "longrope": {
        "short_factor": [1.0 + n / 8 for n in range(64)],
        "long_factor": [1.0 + n / 8 for n in range(64)],
        "original_max_position_embeddings": 1024,
    },
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in SCALINGS),
    ("yarn", {"attention_factor": 0.9}),
    ("yarn", {"mscale": 0.7, "mscale_all_dim": 1.3}),
    ("yarn", {"beta_fast": 16, "beta_slow": 2, "truncate": False}),
    ("yarn", {"factor": 1.0}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_scalings_are_read_and_written(kind: str, options: dict[str, Any]) -> None:
    section = {"rope_type": kind, **SCALINGS[kind], **options}
    config = config_of(rope_scaling=section, max_position_embeddings=8192, head_dim=128)
    assert config.rotation.scaling == kind
    assert config_of(**config.to_hub()) == config


def test_yarn_where_keys_are_missing() -> None:
    keys = {"max_position_embeddings": 8192, "head_dim": 128}
    section = {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    rotation = config_of(rope_scaling=section, **keys).rotation
    assert (rotation.factor, rotation.trained_length) == (4.0, 2048)
    assert rotation.attention_factor == pytest.approx(1.1386294)
    section = {"rope_type": "yarn", "factor": 4.0}
    assert config_of(rope_scaling=section, **keys).rotation.trained_length == 8192
    outside = {"original_max_position_embeddings": 512}
    assert config_of(rope_scaling=section, **keys, **outside).rotation.trained_length == 512


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rope_type": "proportional"}, "must be one of .*rotates a part of each head"),
        ({"rope_type": "axial"}, "must be one of .*by positions in pictures"),
        ({"type": "mrope"}, "must be one of .*by positions in pictures and films"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "'mrope_section' must be None"),
        ({"rope_type": "su"}, "must be one of default, linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": ["yarn"]}, "must be one of"),
        (SCALINGS["longrope"] | {"rope_type": "longrope", "long_factor": [2.0]}, "must equal"),
        (SCALINGS["yarn"] | {"rope_type": "yarn", "beta_fast": 1}, "'beta_fast' must be larger"),
        ({"rope_type": "linear", "factor": 2, "attention_factor": 2.0}, "'attention_factor' must"),
    ],
    ids=str,
)
def test_other_scalings_are_refused_by_name(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        config_of(rope_scaling=section, head_dim=128, max_position_embeddings=8192)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head_dim": 64}, "'short_factor' must hold 32 numbers"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'short_factor' must be a list"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "'factor' must be a number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 1}, "more than 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": 3}}, "'truncate' must"),
    ],
    ids=str,
)
def test_damaged_scalings(keys: dict[str, Any], message: str) -> None:
    scaling = {"rope_type": "longrope", **SCALINGS["longrope"]}
    with pytest.raises(CheckpointError, match=message):
        config_of(**{"rope_scaling": scaling, "max_position_embeddings": 8192, **keys})


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
TWO_KEYS: list[tuple[dict[str, Any], tuple[str, float, float, int]]] = [
    ({"rope_parameters": PLAIN, "rope_scaling": YARN}, ("yarn", 10000.0, 4.0, 32)),
    (
        {"rope_parameters": PLAIN, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ("linear", 10000.0, 4.0, 8192),
    ),
    (
        {"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}, "rope_theta": 7.0},
        ("default", 7.0, 1.0, 8192),
    ),
    ({"rope_parameters": YARN | {"rope_theta": 5.0}, "rope_scaling": {}}, ("yarn", 5.0, 4.0, 32)),
    ({"rope_parameters": YARN, "rope_scaling": None}, ("yarn", 10000.0, 4.0, 32)),
    (
        {"rope_parameters": PLAIN | {"rope_theta": 5.0}, "rope_scaling": YARN, "rope_theta": 7.0},
        ("yarn", 7.0, 4.0, 32),
    ),
    (
        {"rope_parameters": PLAIN, "rope_scaling": YARN | {"rope_theta": 10000}, "rope_theta": 1e4},
        ("yarn", 10000.0, 4.0, 32),
    ),
    ({"rope_scaling": {**YARN, "type": "yarn"}}, ("yarn", 10000.0, 4.0, 32)),
    (
        {"rope_scaling": YARN, "original_max_position_embeddings": 32.0},
        ("yarn", 10000.0, 4.0, 32),
    ),
]
"""Keys that mean one thing, and what transformers 5.24 and mlx-lm 0.32 make of them."""


@pytest.mark.parametrize(("keys", "read"), TWO_KEYS, ids=str)
def test_two_keys_for_one_thing(keys: dict[str, Any], read: tuple[str, float, float, int]) -> None:
    rotation = config_of(**keys).rotation
    length = rotation.trained_length
    assert (rotation.scaling, rotation.theta, rotation.factor, length) == read


@pytest.mark.interop
@pytest.mark.parametrize(("keys", "read"), TWO_KEYS, ids=str)
def test_two_keys_in_transformers(
    keys: dict[str, Any], read: tuple[str, float, float, int]
) -> None:
    from copy import deepcopy

    from transformers import LlamaConfig

    found = LlamaConfig(**deepcopy(keys)).rope_parameters
    scaling, theta, factor, length = read
    assert (found["rope_type"], found["rope_theta"], found.get("factor", 1.0)) == (
        scaling,
        theta,
        factor,
    )
    assert found.get("original_max_position_embeddings", 8192) == length


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rope_theta": 7.0, "rope_parameters": PLAIN},
            "'rope_theta' of 'rope_parameters' and 'rope_theta' must be equal.* 10000.0 and 7.0",
        ),
        (
            {"rope_theta": 7.0, "rope_scaling": YARN | {"rope_theta": 5.0}},
            "'rope_theta' of 'rope_scaling' and 'rope_theta' must be equal",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": PLAIN | {"rope_theta": 5e5}},
            "'rope_theta' must stand in 'rope_scaling', .* 500000.0 stands in 'rope_parameters' alone",
        ),
        (
            {"rope_scaling": {**YARN, "type": "linear"}},
            "'rope_type' of 'rope_scaling' and 'type' of 'rope_scaling' must be equal",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            "'original_max_position_embeddings' and .* of 'rope_scaling' must be equal",
        ),
        (
            {"norm_eps": 1e-5, "rms_norm_eps": 1e-6, "model_type": "hgrn"},
            "'norm_eps' and 'rms_norm",
        ),
    ],
    ids=str,
)
def test_two_keys_that_contradict_each_other(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_of(**{"model_type": "llama", **keys})
    assert "\n" not in str(caught.value)


def test_positions_of_each_kind_of_layer_are_refused() -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedModelError, match=f"'{key}' must be the same for all layers"):
            config_of("qwen3", head_dim=8, **{key: {"full_attention": PLAIN}})
    with pytest.raises(UnsupportedModelError, match="'layer_types' must be full_attention"):
        config_of(layer_types=["full_attention", "sliding_attention"], sliding_window=8)


def test_theta_where_it_is_missing() -> None:
    assert config_of().rotation.theta == 10000.0
    with pytest.raises(CheckpointError, match=r"'rope_theta' must be given .* but is missing"):
        config_of("bitnet", num_key_value_heads=4, rope_theta=None)


@pytest.mark.parametrize("is_normed", [False, True])
def test_yarn_does_not_depend_on_the_chunks(is_normed: bool) -> None:
    mx.random.seed(2)
    rope = RoPE(8, attention_factor=1.7)
    norms = AttentionNorms(qk_eps=1e-6 if is_normed else None)
    mixer = GQA(32, num_heads=4, num_kv_heads=2, rope=rope, norms=norms)
    plain = copy(mixer)
    plain.rope = RoPE(8)
    x = mx.random.normal((1, 12, 32))
    whole, _ = mixer(x)
    state, parts = None, []
    for chunk in mx.split(x, [5, 6, 7], axis=1):
        y, state = mixer(chunk, state)
        parts.append(y)
    assert relative_error(mx.concatenate(parts, axis=1), whole) <= FLOAT32
    assert relative_error(whole, plain(x)[0]) > 100 * FLOAT32
    if not is_normed:
        # the factor of queries and of keys
        plain.query_proj.weight = plain.query_proj.weight * 1.7
        plain.key_proj.weight = plain.key_proj.weight * 1.7
        assert relative_error(plain(x)[0], whole) <= FLOAT32


@pytest.mark.interop
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("at", [0, 8192 - 6])
def test_scalings_equal_transformers(kind: str, options: dict[str, Any], at: int) -> None:
    """The whole model, and the rotation of queries at far positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    keys = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind], **options}
    sizes = SMALL | {"head_dim": 128, "max_position_embeddings": 131072}
    theirs = LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=4, rope_parameters=keys, initializer_range=0.2)
    ).eval()
    config = config_of(**sizes, num_key_value_heads=4, rope_scaling=keys)
    model = find("llama").build(config)
    names = WeightNames(find("llama").weight_names)
    model.load_weights(
        [(names.to_memory(name), mx.array(w.numpy())) for name, w in theirs.state_dict().items()]
    )
    tokens = mx.random.randint(0, 64, (1, 6), key=mx.random.key(0))
    with torch.no_grad():
        positions = torch.arange(at, at + 6)[None]
        want = theirs(torch.tensor(tokens.tolist()), position_ids=positions).logits
        x = torch.randn(1, 4, 6, 128)
        cos, sin = theirs.model.rotary_emb(x, positions)
        rotated, _ = apply_rotary_pos_emb(x, x, cos, sin)
    rope = model.blocks[0].token_mixer.rope
    got = rope(mx.array(x.numpy()), at) * math.sqrt(rope.query_scale)
    assert relative_error(got, mx.array(rotated.numpy())) <= FLOAT32
    if not at:
        assert relative_error(model(tokens)[0], mx.array(want.numpy())) <= FLOAT32
