"""Attention by kernels other than the softmax: cosFormer, Hydra, SimA."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.token_mixers import CosFormer, Hydra, SimA
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden

NAMES = ("query_proj", "key_proj", "value_proj")


def fill_merged(mixer: nn.Module, file: GoldenFile, merged: str, output: str) -> None:
    """Weights of a file that has queries, keys and values in one matrix."""
    for kind in ("weight", "bias"):
        parts = mx.split(file.weights[f"{merged}.{kind}"], 3)
        for name, part in zip(NAMES, parts, strict=True):
            mixer[name][kind] = part
    fill(mixer, file.weights, {"output_proj": output})


@golden("cosformer__attention")
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_cosformer(file: GoldenFile, cut: int) -> None:
    hyper, x, memory = file.hyper, *(file.inputs[name].swapaxes(0, 1) for name in ("x", "kv"))

    def build(max_length: int, **options: bool) -> CosFormer:
        mixer = CosFormer(
            hyper["embed_dim"],
            num_heads=hyper["num_heads"],
            eps=hyper["eps"],
            max_length=max_length,
            bias=True,
            **options,
        )
        linears = dict(zip(NAMES, ("q_proj", "k_proj", "v_proj"), strict=True))
        fill(mixer, file.weights, linears | {"output_proj": "out_proj"})
        return mixer

    length = x.shape[1]
    mixer, state, parts = build(length), None, []
    for start in range(0, length, cut):
        y, state = mixer(x[:, start : start + cut], state)
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1).swapaxes(0, 1), file.out["causal"])
    y, _ = build(length, is_causal=False)(x)
    assert_close(y.swapaxes(0, 1), file.out["self"])
    # the reference has the longer of both lengths for M
    mixer = build(max(length, memory.shape[1]), is_causal=False)
    assert_close(mixer(x, memory=memory)[0].swapaxes(0, 1), file.out["cross"])


@golden("hydra__attention")
def test_hydra(file: GoldenFile) -> None:
    mixer = Hydra(file.hyper["d_model"], bias=True, is_causal=False)
    fill_merged(mixer, file, "qkv", "out")
    x, dropped = file.inputs["x"], file.inputs["mask"]
    assert_close(mixer(x)[0], file.out["y"])
    assert_close(mixer(x, None, ~dropped)[0], file.out["y_masked"])


@golden("sima__attention")
def test_sima(file: GoldenFile) -> None:
    hyper = file.hyper
    mixer = SimA(hyper["dim"], num_heads=hyper["heads"], bias=True)
    fill_merged(mixer, file, "qkv", "proj")
    assert_close(mixer(file.inputs["x"])[0], file.out["y"])


@golden("sima__class_attention")
def test_class_attention(file: GoldenFile) -> None:
    hyper = file.hyper
    mixer = SimA(
        hyper["dim"], num_heads=hyper["heads"], class_only=True, eps=hyper["eps"], bias=True
    )
    fill_merged(mixer, file, "qkv", "proj")
    assert_close(mixer(file.inputs["x"])[0], file.out["y"])
