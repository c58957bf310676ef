"""Stretched positions of heads that are rotated in part: only the rotated dims are scaled."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.publish.runtimes import opening
from mlx_mmfree.layers import DynamicRoPE, RoPE
from mlx_mmfree.models import find
from mlx_mmfree.token_mixers import GQA
from tests.hub.test_qwen35_to_gguf import write_tokenizer
from tests.tolerances import TOLERANCE, relative_error

QWEN35 = find("qwen3_5_text")
TOKENS = (mx.arange(40) * 7 + 3)[None] % QWEN35.tiny["vocab_size"]
# a quarter of 32 dims: 4 rotated pairs
FACTORS = [1.0, 1.25, 1.5, 2.0]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": FACTORS,
        "long_factor": FACTORS,
        "original_max_position_embeddings": 64,
    },
}


def described(kind: str, **keys: Any) -> dict[str, Any]:
    """The configuration of a Qwen3.5 that rotates a quarter of each head."""
    rotary = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    return {
        **QWEN35.tiny,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "rope_theta": 1e4,
        "rope_parameters": {**rotary, **SCALINGS[kind], **keys},
    }


def saved(folder: Path, kind: str, **keys: Any) -> Path:
    mx.random.seed(5)
    save_model(folder, QWEN35.build(QWEN35.config.from_hub(described(kind, **keys))))
    return folder


@pytest.mark.sample(2)
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("kind", SCALINGS)
def test_logits_are_those_of_mlx_lm(tmp_path: Path, kind: str) -> None:
    from mlx_lm.utils import load_model as load_by_mlx_lm

    source = saved(tmp_path / "m", kind)
    write_tokenizer(source)
    report = convert(open_checkpoint(source), tmp_path / "mlx", to="mlx")
    opened = opening(report.openings, "mlx-lm")
    assert opened is not None and opened.opens
    theirs, _ = load_by_mlx_lm(tmp_path / "mlx")
    want, ours = theirs(TOKENS), load_model(source)
    assert relative_error(ours(TOKENS)[0], want) <= TOLERANCE[mx.float32]
    assert relative_error(read_in_parts(ours, TOKENS), want) <= TOLERANCE[mx.float32]


def read_in_parts(model: Any, tokens: mx.array) -> mx.array:
    """The logits of a text that is read as a prompt and then token by token."""
    logits, state = model(tokens[:, :20])
    found = [logits]
    for token in mx.split(tokens[:, 20:], tokens.shape[1] - 20, axis=1):
        logits, state = model(token, state)
        found.append(logits)
    return mx.concatenate(found, axis=1)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_keeps_them(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "m", kind)
    write_tokenizer(folder)
    convert(open_checkpoint(folder), tmp_path / "g", to="gguf")
    want, got = (load_model(path, dtype=mx.float32) for path in (folder, tmp_path / "g"))
    assert got.config.rotation.scaling == kind
    assert relative_error(got(TOKENS)[0], want(TOKENS)[0]) <= 5e-3


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize(
    "rope",
    [
        RoPE(8, attention_factor=1.5),
        RoPE(8, attention_factor=1.5, is_interleaved=True),
        DynamicRoPE(8, factor=4.0, trained_length=5),
        DynamicRoPE(8, factor=4.0, trained_length=5, is_interleaved=True),
    ],
    ids=str,
)
def test_dims_after_the_rotated_ones_stay(rope: RoPE, length: int) -> None:
    x = mx.random.normal((2, 3, length, 20), key=mx.random.key(0))
    first, others = mx.split(x, [8], axis=-1)
    assert mx.array_equal(rope(x, 3), mx.concatenate([rope(first, 3), others], axis=-1))
    scaled = mx.concatenate([first * rope.query_scale, others], axis=-1)
    assert mx.array_equal(rope.scaled(x), scaled)


def test_a_step_scales_the_rotated_dims_alone() -> None:
    mixer = GQA(32, num_heads=4, num_kv_heads=2, rope=RoPE(4, attention_factor=1.5))
    x = mx.random.normal((1, 12, 32), key=mx.random.key(1))
    whole, _ = mixer(x)
    state, steps = None, []
    for token in mx.split(x, 12, axis=1):
        y, state = mixer(token, state)
        steps.append(y)
    assert relative_error(mx.concatenate(steps, axis=1), whole) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        (
            "longrope",
            {"short_factor": [1.0] * 16, "long_factor": [1.0] * 16},
            "must hold 4 numbers",
        ),
        ("dynamic", {"partial_rotary_factor": 0.0625}, "at least 4 dims of a head"),
    ],
)
def test_what_does_not_fit_the_rotated_dims(kind: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        QWEN35.config.from_hub(described(kind, **keys))


@pytest.mark.interop
@pytest.mark.parametrize("kind", SCALINGS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path / "m", kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = mx.array(theirs(torch.tensor(TOKENS.tolist())).logits.numpy())
    assert relative_error(load_model(folder)(TOKENS)[0], want) <= TOLERANCE[mx.float32]
