"""Llama and BitNet: published sizes, configurations, formats, states, what is refused."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.layers import BitLinear, pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.models.parts.rotation import Rotation
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.ops import use_backend
from tests.hub.checkpoints import tiny_transformer
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
}
BITNET = {"quant_method": "bitnet"}
TOKENS = mx.array([[1, 5, 9, 2, 7, 7, 3]])


def config_of(model_type: str = "llama", **keys: Any) -> Any:
    base = {} if "rope_parameters" in keys else {"rope_theta": 10000.0}
    return find(model_type).config.from_hub(SMALL | {"num_key_value_heads": 4} | base | keys)


def build_seeded(**keys: Any) -> Decoder:
    mx.random.seed(2)
    return find("llama").build(config_of(initializer_range=0.2, **keys))


# by name: the model type, keys of the configuration, and parameters in millions
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "bitnet-b1.58-2B-4T": (
        "bitnet",
        {
            "hidden_act": "relu2",
            "rope_theta": 500000.0,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 30,
            "num_attention_heads": 20,
            "num_key_value_heads": 5,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        2413,
    ),
    "bitnet_b1_58-3B": (
        "llama",
        {
            "architectures": ["BitnetForCausalLM"],
            "weight_bits": 1,
            "input_bits": 8,
            "hidden_size": 3200,
            "intermediate_size": 8640,
            "num_hidden_layers": 26,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "vocab_size": 32002,
        },
        3324,
    ),
    "Falcon3-10B-Base-1.58bit": (
        "llama",
        {
            "head_dim": 256,
            "hidden_size": 3072,
            "intermediate_size": 23040,
            "num_hidden_layers": 40,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "quantization_config": BITNET | {"modules_to_not_convert": ["lm_head"]},
            "rope_theta": 1000042,
            "vocab_size": 131072,
        },
        10306,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    model_type, keys, millions = PUBLISHED[name]
    architecture = find(model_type)
    config = architecture.config.from_hub(keys)
    model = architecture.build(config)
    count = sum(value.size for _, value in tree_flatten(model.parameters()))
    assert round(count / 1e6) == millions
    linears = [module for module in model.modules() if isinstance(module, BitLinear)]
    assert len(linears) == 7 * config.num_hidden_layers
    assert not isinstance(model.blocks[0].token_mixer.query_proj, nn.Linear)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"head_dim": None, "num_key_value_heads": None},
        {"head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            }
        },
        {"quantization_config": BITNET},
        {"quantization_config": BITNET | {"use_rms_norm": True, "rms_norm_eps": 1e-3}},
        {"quantization_config": BITNET | {"modules_to_not_convert": ["lm_head", "v_proj"]}},
        {"architectures": ["BitnetForCausalLM"], "weight_bits": 1, "input_bits": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["llama", "bitnet"])
def test_config_survives_a_round_trip(model_type: str, keys: dict[str, Any]) -> None:
    config = config_of(model_type, **keys)
    assert find(model_type).config.from_hub(config.to_hub()) == config
    logits, _ = find(model_type).build(config)(TOKENS)
    assert logits.shape == (1, 7, 64)


def test_positions_are_read_from_either_key() -> None:
    old = config_of(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = config_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    assert old.rotation == new.rotation == Rotation(500.0, "linear", 2.0)
    assert config_of().rotation == Rotation(10000.0)


class TestTernaryLinears:
    def test_dense_unless_the_configuration_says_more(self) -> None:
        assert config_of("llama").linears is None
        assert config_of("bitnet").linears == TernaryLinears()
        assert config_of("llama", quantization_config=BITNET).linears == TernaryLinears()

    def test_unknown_keys_are_refused_in_one_line(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"'a\\nb' must be None but got 1"):
            config_of("llama", quantization_config=BITNET | {"a\nb": 1})

    def test_head_is_dense_unless_a_list_leaves_it_out(self) -> None:
        null = BITNET | {"modules_to_not_convert": None}
        for described, is_ternary in [
            (BITNET, False),
            (null, False),
            (BITNET | {"modules_to_not_convert": ["lm_head"]}, False),
            (BITNET | {"modules_to_not_convert": []}, True),
        ]:
            model = find("llama").build(config_of(quantization_config=described))
            assert isinstance(model.head, BitLinear) == is_ternary

    @pytest.mark.parametrize(
        ("excluded", "count"),
        [
            (["lm_head", "v_proj"], 12),
            (["lm_head", "model.layers.1"], 7),
            (["lm_head", "model.layers.1.mlp"], 11),
            (["lm_head", "model.layers.0.self_attn.q_proj"], 13),
            (["lm_head", "proj", "layers.1.m"], 14),
        ],
        ids=str,
    )
    def test_excluded_linears(self, excluded: list[str], count: int) -> None:
        described = BITNET | {"modules_to_not_convert": excluded}
        config = config_of(quantization_config=described, attention_bias=True)
        model = find("llama").build(config)
        assert sum(isinstance(module, BitLinear) for module in model.modules()) == count
        assert all("bias" in block.token_mixer.value_proj for block in model.blocks)
        assert model(TOKENS)[0].shape == (1, 7, 64)


@pytest.fixture(
    params=[
        {"model_type": "bitnet"},
        {"has_sub_norms": True, "tie_word_embeddings": True},
        {"linears": TernaryLinears(1e-6, ()), "attention_bias": True},
        {"linears": None},
    ],
    ids=str,
)
def model(request: pytest.FixtureRequest) -> Decoder:
    return tiny_transformer(**request.param)


def test_packed_model_has_equal_logits(model: Decoder) -> None:
    # a fused backend sums a norm's squares in its own order
    with use_backend("reference"):
        want, _ = model(TOKENS)
        assert mx.array_equal(pack_linears(model)(TOKENS)[0], want)


def test_state_carries_over_chunks_and_rows(model: Decoder) -> None:
    whole, _ = model(TOKENS)
    first, state = model(mx.concatenate([TOKENS[:, :3] + 1, TOKENS[:, :3]]))
    state = tree_map(lambda array: array[mx.array([1])], state)
    second, _ = model(TOKENS[:, 3:], state)
    assert relative_error(mx.concatenate([first[1:], second], axis=1), whole) <= FLOAT32


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_dynamic_scaling_is_read_and_written(key: str, spelling: str) -> None:
    section = {spelling: "dynamic", "factor": 4.0, "rope_theta": 500.0}
    keys: dict[str, Any] = {"max_position_embeddings": 64, "rope_theta": 500.0, key: section}
    config = config_of(**keys)
    assert config.rotation == Rotation(500.0, "dynamic", 4.0, trained_length=64)
    assert config_of(**config.to_hub()) == config


def test_dynamic_scaling_does_not_depend_on_the_chunks() -> None:
    keys = {"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    plain, model = build_seeded(), build_seeded(**keys)
    tokens = mx.random.randint(0, 64, (1, 40), key=mx.random.key(0))
    whole, _ = model(tokens)
    state, parts = None, []
    for chunk in mx.split(tokens, [7, 8, 9, 21], axis=1):
        logits, state = model(chunk, state)
        parts.append(logits)
    assert relative_error(mx.concatenate(parts, axis=1), whole) <= FLOAT32
    unscaled = plain(tokens)[0]
    assert relative_error(whole[:, :8], unscaled[:, :8]) <= FLOAT32
    assert relative_error(whole[:, 8:], unscaled[:, 8:]) > 100 * FLOAT32


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_dynamic_scaling_equals_transformers_token_by_token() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    keys = {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    theirs = LlamaForCausalLM(
        LlamaConfig(
            **SMALL,
            num_key_value_heads=4,
            max_position_embeddings=8,
            rope_parameters=keys,
            initializer_range=0.2,
        )
    ).eval()
    model = build_seeded(max_position_embeddings=8, rope_scaling=keys)
    names = WeightNames(find("llama").weight_names)
    weights = {
        names.to_memory(name): mx.array(w.numpy()) for name, w in theirs.state_dict().items()
    }
    model.load_weights(list(weights.items()))
    tokens = mx.random.randint(0, 64, (1, 40), key=mx.random.key(0))
    cache, want = None, []
    with torch.no_grad():
        for token in tokens[0].tolist():
            result = theirs(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            want.append(mx.array(result.logits.numpy()))
    assert relative_error(model(tokens)[0], mx.concatenate(want, axis=1)) <= FLOAT32


def test_left_padded_row_equals_the_row_alone(model: Decoder) -> None:
    tokens = mx.concatenate([mx.zeros((1, 4), mx.int32), TOKENS], axis=1)
    valid = mx.arange(11)[None] >= 4
    other = mx.random.randint(0, 40, (1, 11))
    logits, state = model(
        mx.concatenate([other, tokens]), None, mx.concatenate([mx.ones((1, 11), mx.bool_), valid])
    )
    want, want_state = model(TOKENS)
    assert relative_error(logits[1:, 4:], want) <= FLOAT32
    step = mx.array([[3]])
    after, _ = model(mx.broadcast_to(step, (2, 1)), state)
    assert relative_error(after[1:], model(step, want_state)[0]) <= FLOAT32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' must be a whole number"),
        ({"num_attention_heads": 5}, "'num_attention_heads' must divide 'hidden_size'"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' must divide"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' must be a whole number"),
        ({"head_dim": 7}, "'head_dim' must be even"),
        ({"head_dim": "8"}, "'head_dim' must be a whole number"),
        ({"rope_theta": 0}, "'rope_theta' must be a number"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' must be given"),
        ({"rope_scaling": {"type": "dynamic"}}, "'factor' must be given"),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "'rope_type' must not be dynamic unless at least 4 dims",
        ),
        (
            {"max_position_embeddings": 2**31, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "'max_position_embeddings' must be a whole number",
        ),
        ({"quantization_config": "bitnet"}, "'quantization_config' must be an object"),
        (
            {"quantization_config": BITNET | {"modules_to_not_convert": "lm_head"}},
            "'modules_to_not_convert' must be a list of names",
        ),
        (
            {"quantization_config": BITNET | {"use_rms_norm": 1}},
            "'use_rms_norm' must be true or false",
        ),
    ],
    ids=str,
)
def test_bad_values_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(**keys)


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu' or 'swish' but got 'gelu'"),
        ("bitnet", {"hidden_act": "gelu"}, "must be 'relu2' or 'silu' or 'swish' but got 'gelu'"),
        ("llama", {"rope_interleaved": True}, "'rope_interleaved' must be False"),
        ("llama", {"use_parallel_residual": True}, "'use_parallel_residual' must be False"),
        ("llama", {"rotary_pct": 0.25}, "'rotary_pct' must be 1.0"),
        ("llama", {"weight_bits": 1}, "'weight_bits' must come with 'quantization_config'"),
        ("llama", {"weight_bits": 2}, "'weight_bits' must be 1"),
        ("llama", {"input_bits": 4}, "'input_bits' must be 8"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "ntk", "factor": 2}},
            "default, linear, dynamic, llama3",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "alpha": 1000.0}},
            "'alpha' must be None",
        ),
        (
            "llama",
            {
                "max_position_embeddings": 64,
                "rope_scaling": {
                    "rope_type": "dynamic",
                    "factor": 2,
                    "original_max_position_embeddings": 32,
                },
            },
            "'original_max_position_embeddings' must be 64",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "'partial_rotary_factor' must be 1.0",
        ),
        ("llama", {"quantization_config": BITNET | {"group_size": 64}}, "'group_size' must be"),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "'high_freq_factor' must be larger",
        ),
    ],
    ids=str,
)
def test_other_mathematics_are_refused(model_type: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(model_type, **keys)


def test_each_linear_is_made_once_and_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []

    def counted(kind: type[nn.Module]) -> None:
        init = kind.__init__

        def record(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            init(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", record)

    counted(nn.Linear)
    counted(BitLinear)
    excluded = ["lm_head", "model.layers.1.self_attn", "mlp.up_proj"]
    described = BITNET | {"modules_to_not_convert": excluded}
    model = build_seeded(quantization_config=described)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear | BitLinear)]
    assert len(made) == len(linears) == 2 * 7 + 1
    dense = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    attention = ("query_proj", "key_proj", "value_proj", "output_proj")
    assert dense == {
        "head",
        *(f"blocks.1.token_mixer.{name}" for name in attention),
        *(f"blocks.{n}.channel_mixer.up_proj" for n in (0, 1)),
    }
