"""Faults planted in Qwen3.5 and in its rotation change the logits of published formats at once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.hub import load_model
from mlx_mmfree.layers import rotated
from mlx_mmfree.layers.attention import served
from mlx_mmfree.layers.attention.mixer import SelfAttention
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.rotated import RotatedEmbedding, RotatedLinear
from mlx_mmfree.models import Decoder, qwen3_5_text
from mlx_mmfree.ops import gated_delta_net, hadamard

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
PLAIN, ROTATED, TILED = "qwen35_hub", "prism_schema1", "gguf_qwen35_q2_0"
TOLERANCE = 2e-4
"""The largest allowed difference of two implementations."""

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


@cache
def golden(case: str) -> dict[str, mx.array]:
    return mx.load(str(GOLDENS / case / "golden.safetensors"))


def model_of(case: str) -> Decoder:
    folder = GOLDENS / case
    file = folder / "model.gguf"
    return load_model(file if file.exists() else folder, dtype=mx.float32)


def error(case: str, model: Decoder) -> float:
    logits, _ = model(golden(case)["input_ids"])
    return float(mx.abs(logits - golden(case)["logits"]).max().item())


def rotated_layers(model: Decoder) -> list[RotatedLinear]:
    return [each for each in matrices(model).values() if isinstance(each, RotatedLinear)]


def flip_a_sign(model: Decoder) -> None:
    layer = rotated_layers(model)[1]
    layer.signs = layer.signs * mx.where(mx.arange(layer.input_dims) == 5, -1.0, 1.0)


def halve_the_blocks(model: Decoder) -> None:
    for layer in rotated_layers(model):
        layer.block //= 2


def leave_out_the_rotation(model: Decoder) -> None:
    model.embed.signs = mx.ones(model.embed.signs.shape)


def add_one_twice(model: Decoder) -> None:
    for block in model.blocks:
        block.token_norm.weight = block.token_norm.weight + 1


def reverse_the_taps(model: Decoder) -> None:
    for block in model.blocks:
        if "qkv_conv" in block.token_mixer:
            convolution = block.token_mixer.qkv_conv
            convolution.weight = convolution.weight[..., ::-1]


def rotate_whole_heads(model: Decoder) -> None:
    for block in model.blocks:
        if isinstance(block.token_mixer, SelfAttention):
            attention = block.token_mixer
            attention.rope = model.config.rotation.build(attention.head_dim)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (ROTATED, flip_a_sign),
        (ROTATED, halve_the_blocks),
        (ROTATED, leave_out_the_rotation),
        (ROTATED, add_one_twice),
        (PLAIN, add_one_twice),
        (PLAIN, reverse_the_taps),
        (PLAIN, rotate_whole_heads),
    ],
)
def test_faults_of_weights(case: str, fault: Callable[[Decoder], None]) -> None:
    model = model_of(case)
    assert error(case, model) <= TOLERANCE
    fault(model)
    assert error(case, model) > 10 * TOLERANCE


def swap_sign_and_transform(patch: Patch) -> None:
    def swapped(x: mx.array, block: int, signs: mx.array, *, inverse: bool = False) -> mx.array:
        return hadamard(x, block, signs, inverse=not inverse)

    patch.setattr(rotated, "hadamard", swapped)


def forget_the_embedding(patch: Patch) -> None:
    def rows(self: RotatedEmbedding, tokens: mx.array) -> mx.array:
        codes = (self[key][tokens] for key in ("weight", "scales", "biases"))
        return mx.dequantize(*codes, self.codes_group, self.bits)

    patch.setattr(RotatedEmbedding, "__call__", rows)


def tile_the_keys(patch: Patch) -> None:
    def tiled(x: mx.array, count: int, axis: int) -> mx.array:
        return mx.concatenate([x] * count, axis=axis)

    patch.setattr(gated_delta_net.mx, "repeat", tiled)


def leave_out_the_gate(patch: Patch) -> None:
    plain = served.without_gates

    def without(projected: mx.array, num_heads: int, dims: int) -> Any:
        return plain(projected, num_heads, dims)[0], None

    patch.setattr(served, "without_gates", without)


def split_queries_from_gates(patch: Patch) -> None:
    def split(projected: mx.array, num_heads: int, dims: int) -> Any:
        width = num_heads * dims
        queries, gates, others = mx.split(projected, [width, 2 * width], axis=-1)
        return mx.concatenate([queries, others], axis=-1), gates

    patch.setattr(served, "without_gates", split)


def gate_before_the_norm(patch: Patch) -> None:
    def gated(o: mx.array, gate: mx.array, weight: mx.array, *, eps: float) -> mx.array:
        gate = gate.astype(mx.float32)
        return mx.fast.rms_norm(o * gate * mx.sigmoid(gate), weight, eps)

    patch.setattr(gated_delta_net, "gated_rms_norm", gated)


def leave_out_the_decay(patch: Patch) -> None:
    def ones(steps: mx.array, *of_heads: mx.array) -> mx.array:
        return mx.ones((*steps.swapaxes(1, 2).shape, 1))

    patch.setattr(gated_delta_net, "head_gates", ones)


def leave_out_the_length(patch: Patch) -> None:
    patch.setattr(gated_delta_net, "unit_length", lambda x: x)


def leave_out_the_one(patch: Patch) -> None:
    patch.setattr(qwen3_5_text, "store_less_one", lambda norm: None)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (ROTATED, swap_sign_and_transform),
        (ROTATED, forget_the_embedding),
        (PLAIN, tile_the_keys),
        (PLAIN, leave_out_the_gate),
        (PLAIN, split_queries_from_gates),
        (PLAIN, gate_before_the_norm),
        (PLAIN, leave_out_the_decay),
        (PLAIN, leave_out_the_length),
        (PLAIN, leave_out_the_one),
    ],
)
def test_faults_of_code(case: str, fault: Fault, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert error(case, model_of(case)) > 10 * TOLERANCE


def test_heads_in_the_order_of_the_file() -> None:
    format = qwen3_5_text._GGUF
    held = format.heads
    assert error(TILED, model_of(TILED)) <= TOLERANCE
    try:
        object.__setattr__(format, "heads", lambda name, config: None)
        assert error(TILED, model_of(TILED)) > 10 * TOLERANCE
    finally:
        object.__setattr__(format, "heads", held)
