"""Reformer: configurations, positions, steps, drafts, what is refused.

What it computes is compared with Transformers in `goldens` and `hub`.
"""

import random
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import CheckpointError, MMFreeError, NumericalError, UnsupportedModelError
from mlx_mmfree.generation import generate_tokens
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import StatesByPosition
from mlx_mmfree.models import Decoder, find
from tests.tolerances import TOLERANCE, relative_error

ARCHITECTURE = find("reformer")
CRIME = {
    "attention_head_size": 64,
    "attn_layers": ["local", "lsh", "local", "lsh", "local", "lsh"],
    "axial_pos_embds": True,
    "axial_pos_embds_dim": [64, 192],
    "axial_pos_shape": [512, 1024],
    "feed_forward_size": 512,
    "hash_seed": None,
    "hidden_act": "relu",
    "hidden_size": 256,
    "is_decoder": True,
    "layer_norm_eps": 1e-12,
    "local_attn_chunk_length": 64,
    "local_num_chunks_after": 0,
    "local_num_chunks_before": 1,
    "lsh_attn_chunk_length": 64,
    "lsh_num_chunks_after": 0,
    "lsh_num_chunks_before": 1,
    "max_position_embeddings": 524288,
    "model_type": "reformer",
    "num_attention_heads": 2,
    "num_buckets": [64, 128],
    "num_hashes": 1,
    "vocab_size": 320,
}
"""`google/reformer-crime-and-punishment`, as PaddleNLP's copy of its configuration has it."""
ENWIK8 = CRIME | {
    "attention_head_size": 128,
    "attn_layers": ["local", "local", "lsh", "local"] * 3,
    "axial_pos_embds_dim": [256, 768],
    "axial_pos_shape": [128, 512],
    "feed_forward_size": 4096,
    "hidden_size": 1024,
    "local_attn_chunk_length": 128,
    "lsh_attn_chunk_length": 256,
    "max_position_embeddings": 65536,
    "num_attention_heads": 8,
    "num_buckets": 512,
    "num_hashes": 4,
    "vocab_size": 258,
}
"""`google/reformer-enwik8`, from the same file."""


def config_of(**keys: Any) -> Any:
    return ARCHITECTURE.config.from_hub({**ARCHITECTURE.tiny, **keys})


def build(**keys: Any) -> Decoder:
    mx.random.seed(2)
    model: Decoder = ARCHITECTURE.build(config_of(initializer_range=0.3, **keys))
    return model


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"axial_pos_embds": False, "hidden_act": "gelu", "num_buckets": 6},
        {"attn_layers": ["local"], "num_buckets": None, "hash_seed": 3},
        CRIME,
        ENWIK8,
    ],
    ids=["tiny", "rows", "local", "crime-and-punishment", "enwik8"],
)
def test_config_survives_a_round_trip(keys: dict[str, Any]) -> None:
    config = config_of(**keys)
    assert ARCHITECTURE.config.from_hub(config.to_hub()) == config


@pytest.mark.parametrize(
    ("shape", "chunk", "rows", "want"),
    [
        ([64, 64], 64, 4096, (128,)),
        ([16, 32], 8, 4096, (8, 16)),
        ([32, 32], 4, 1024, (16, 32)),
        (None, 8, 200, (4, 8)),
        ([64, 128], 16, 8192, (32, 32)),
        ([16, 6], 16, 96, (8,)),
    ],
)
def test_buckets_follow_from_the_longest_text(
    shape: list[int] | None, chunk: int, rows: int, want: tuple[int, ...]
) -> None:
    """Those that transformers 5.24.0 sets when its first text is as long."""
    keys: dict[str, Any] = {"num_buckets": None, "lsh_attn_chunk_length": chunk}
    keys |= {"axial_pos_shape": shape} if shape else {"axial_pos_embds": False}
    config = config_of(**keys, max_position_embeddings=rows)
    assert config.num_buckets == want
    assert ARCHITECTURE.config.from_hub(config.to_hub()) == config


def test_a_text_is_read_alike_alone_and_in_a_longer_batch() -> None:
    model = build(num_buckets=None)
    tokens = mx.random.randint(0, 60, (2, 40), key=mx.random.key(4))
    padded = mx.pad(tokens[:1, :18], [(0, 0), (0, 22)])
    valid = mx.arange(40)[None] < mx.array([[18], [40]])
    batch = mx.concatenate([padded, tokens[1:]])
    want = model(tokens[:1, :18])[0]
    got = model(batch, valid=valid)[0][:1, :18]
    assert relative_error(got, want) <= TOLERANCE[mx.float32]


def test_published_positions_reach_far() -> None:
    model = ARCHITECTURE.build(ARCHITECTURE.config.from_hub(CRIME))
    code = model.positions.code(mx.array([0, 1023, 1024, 524_287, 524_288]))
    assert mx.array_equal(code[1, :64], code[0, :64]) and mx.array_equal(code[2, 64:], code[0, 64:])
    assert not mx.array_equal(code[1, 64:], code[0, 64:])
    assert mx.isfinite(code[:4]).all().item() and mx.isnan(code[4]).all().item()


def test_a_text_beyond_the_positions_ends_in_an_error() -> None:
    model = build(axial_pos_shape=[2, 4])
    assert model.max_length == 8
    with pytest.raises(NumericalError):
        list(generate_tokens(model, [1, 2, 3], max_tokens=9))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_up_to_a_chunk_whole_is_chunks(count: int) -> None:
    model = build()
    tokens = mx.random.randint(0, 60, (2, 8))
    whole, _ = model(tokens)
    state, parts = None, []
    for start in range(0, 8, count):
        logits, state = model(tokens[:, start : start + count], state)
        parts.append(logits)
    assert relative_error(mx.concatenate(parts, axis=1), whole) <= TOLERANCE[mx.float32]


@pytest.mark.equal_bits
def test_later_tokens_may_be_taken_back() -> None:
    """Each token of a draft sees what it would if it were read alone."""
    model = build()
    tokens = mx.random.randint(0, 60, (1, 30))
    _, state = model(tokens[:, :20])
    steps, single = [], state
    for n in range(20, 25):
        logits, single = model(tokens[:, n : n + 1], single)
        steps.append(logits)
    hidden, drafted = model.hidden(tokens[:, 20:25], state, by_position=True)
    got, want = model.logits(hidden), mx.concatenate(steps, axis=1)
    assert relative_error(got, want) <= TOLERANCE[mx.float32]
    assert all(isinstance(each, StatesByPosition) for each in drafted)


def test_streams_are_normed_side_by_side() -> None:
    model = build(attn_layers=["local"], num_buckets=None)
    x = model.embed(mx.array([[3, 7]]))
    y, _ = model.run(x, model.init_state(1), Context())
    assert y.shape == (1, 2, 64)
    assert mx.allclose(y, model.norm(_streams(model, x)), atol=1e-6)


def _streams(model: Decoder, x: mx.array) -> mx.array:
    first = second = x + model.positions.code(mx.arange(x.shape[1])[None])
    [block] = model.blocks
    first = first + block.token_mixer(block.token_norm(second))[0]
    second = second + block.channel_mixer(block.channel_norm(first))
    return mx.concatenate([first, second], axis=-1)


@pytest.mark.parametrize(
    "keys",
    [
        {"is_decoder": None},
        {"is_decoder": False},
        {"tie_word_embeddings": True},
        {"hidden_act": "elu"},
        {"local_num_chunks_before": 2},
        {"local_num_chunks_after": 1},
        {"lsh_num_chunks_before": 2},
        {"lsh_attn_chunk_length": 6},
    ],
    ids=str,
)
def test_other_mathematics_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(keys))):
        config_of(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_layers": ["global"]},
        {"attn_layers": []},
        {"axial_pos_shape": [4]},
        {"axial_pos_embds_dim": [8, 8]},
        {"num_buckets": 5},
        {"num_buckets": []},
        {"hash_seed": -1},
    ],
    ids=str,
)
def test_damaged_configurations_name_the_key(keys: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(keys))):
        config_of(**keys)


def test_hostile_configurations() -> None:
    rng = random.Random(0)
    values: list[Any] = [None, -1, 0, 2**40, 1.5, "x", [], [[]], {}, True, 10**30, float("nan")]
    keys = list(config_of().to_hub())
    for _ in range(400):
        changed = {rng.choice(keys): rng.choice(values) for _ in range(2)}
        try:
            config = config_of(**changed)
        except MMFreeError as error:
            assert "\n" not in str(error)
        else:
            assert ARCHITECTURE.config.from_hub(config.to_hub()) == config
