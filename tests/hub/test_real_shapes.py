"""Whole models of two layers in the shapes of published ones, against code that is not ours."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.hub import load_model
from mlx_mmfree.models import bitnet
from mlx_mmfree.models.parts.architecture import WeightNames
from tests.hub.checkpoints import random_checkpoint
from tests.models import published_hgrn_bit
from tests.models.forced_codes import Codes, force
from tests.tolerances import TOLERANCE, relative_error

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

TOKENS = [1, 31_999, 7]
ONE_CODE = 1e-3


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")


def test_bitnet_2b_4t_against_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import BitNetForCausalLM

    dims, inner, layers, vocabulary = 2_560, 6_912, 2, 128_256
    config = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "relu2",
        "hidden_size": dims,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        },
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, dims),
        "model.norm.weight": (dims,),
    }
    for n in range(layers):
        at = f"model.layers.{n}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.attn_sub_norm"):
            shapes[f"{at}{name}.weight"] = (dims,)
        shapes[f"{at}mlp.ffn_sub_norm.weight"] = (inner,)
        for name, outputs in (("q", dims), ("k", 640), ("v", 640), ("o", dims)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (outputs, dims)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (inner, dims)
        shapes[f"{at}mlp.down_proj.weight"] = (dims, inner)
    random_checkpoint(tmp_path / "m", config, shapes)
    theirs = BitNetForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    seen: dict[str, tuple[mx.array, mx.array]] = {}
    for name, module in theirs.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(partial(_keep, seen, name))
    with torch.no_grad():
        want = mx.array(theirs(torch.tensor([TOKENS])).logits.numpy())
    del theirs
    ours = load_model(tmp_path / "m", dtype=mx.float32)
    # the same input has the same codes: every linear by itself is equal
    modules = dict(ours.named_modules())
    names = WeightNames(bitnet.WEIGHT_NAMES)
    for name, (x, y) in seen.items():
        linear = modules[str(names.to_memory(f"{name}.weight")).removesuffix(".weight")]
        assert relative_error(linear(x), y) <= TOLERANCE[mx.float32], name
    assert len(seen) == 7 * layers
    # projections of one input share their codes
    linears = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    given = [_codes(seen[f"model.layers.{n}.{name}"][0]) for n in range(layers) for name in linears]
    force(monkeypatch, given, ONE_CODE)
    assert relative_error(ours(mx.array([TOKENS]))[0], want) <= TOLERANCE[mx.float32]


def _keep(seen: dict[str, Any], name: str, module: Any, inputs: Any, output: Any) -> None:
    seen[name] = mx.array(inputs[0].numpy()), mx.array(output.numpy())


def _codes(x: mx.array) -> Codes:
    """The activation codes of one sequence, in the arithmetic of transformers."""
    values = np.array(x[0])
    scale = np.float32(127) / np.maximum(
        np.abs(values).max(axis=-1, keepdims=True), np.float32(1e-5)
    )
    return np.round(values * scale), scale


def test_mmfreelm_2_7b_against_the_published_mathematics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 2
    config, shapes = published_hgrn_bit.checkpoint(2_560, 6_912, layers, 32_000)
    weights = random_checkpoint(tmp_path / "m", config | {"intermediate_size": None}, shapes)
    want, codes = published_hgrn_bit.logits(weights, np.array(TOKENS), layers)
    del weights
    ours = load_model(tmp_path / "m", dtype=mx.float32)
    force(monkeypatch, [codes[name] for name in published_hgrn_bit.linears(layers)], ONE_CODE)
    got = ours(mx.array([TOKENS]))[0]
    assert relative_error(got, mx.array(want.astype(np.float32))[None]) <= TOLERANCE[mx.float32]
