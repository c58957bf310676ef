"""Attention to keys that are projected along the sequence."""

from typing import Any

import mlx.core as mx

from mlx_mmfree.token_mixers import Linformer
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


def _mixer(file: GoldenFile, linears: dict[str, str], **options: Any) -> Linformer:
    hyper = file.hyper
    mixer = Linformer(
        hyper["dim"],
        max_length=hyper["seq_len"],
        num_projected=hyper["k"],
        num_heads=hyper["heads"],
        output_bias=True,
        **options,
    )
    fill(mixer, file.weights, {"query_proj": "to_q", "output_proj": "to_out"} | linears)
    return mixer


@golden("linformer__separate_kv")
def test_separate_keys_and_values(file: GoldenFile) -> None:
    mixer = _mixer(file, {"key_proj": "to_k", "value_proj": "to_v"})
    mixer.key_length_proj.weight = file.weights["proj_k"].T
    mixer.value_length_proj.weight = file.weights["proj_v"].T
    x, memory = file.inputs["x"], file.inputs["context"]
    assert_close(mixer(x)[0], file.out["self"])
    assert_close(mixer(x, memory=memory)[0], file.out["short_context"])
    # padding stands after the tokens, wherever it was
    padded = mx.pad(memory, [(0, 0), (1, 1), (0, 0)], constant_values=3.0)
    position = mx.arange(padded.shape[1])
    valid = mx.logical_and(position >= 1, position < padded.shape[1] - 1)
    valid = mx.broadcast_to(valid, padded.shape[:2])
    y, _ = mixer(x, memory=padded, memory_valid=valid)
    assert_close(y, file.out["short_context"])


@golden("linformer__share_kv_one_head")
def test_values_are_keys_of_one_head(file: GoldenFile) -> None:
    hyper = file.hyper
    options = {"shares_values": hyper["share_kv"], "has_one_kv_head": hyper["one_kv_head"]}
    mixer = _mixer(file, {"key_proj": "to_k"}, **options)
    mixer.key_length_proj.weight = file.weights["proj_k"].T
    assert_close(mixer(file.inputs["x"])[0], file.out["self"])
