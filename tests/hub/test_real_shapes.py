"""Whole models of two layers in the shapes of published ones, against code that is not ours."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.hub import load_model
from mlx_mmfree.hub.names import WeightNames
from mlx_mmfree.models import bitnet
from tests.models import published_hgrn_bit
from tests.tolerances import TOLERANCE, relative_error

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

TOKENS = [1, 31_999, 7]
# One activation at a rounding boundary moves its product by 4e-4, and the codes behind it move some
# more of theirs in each further layer.
ONE_CODE, FEW_CODES = 1e-3, 5e-2


def normal(shape: tuple[int, ...], scale: float, mean: float = 0.0) -> mx.array:
    random = np.random.default_rng(sum(shape))
    return mx.array(random.standard_normal(shape, dtype=np.float32) * scale + mean, mx.bfloat16)


def write(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A checkpoint with matrices around 0 and norms around 1, in bfloat16."""
    folder.mkdir()
    tensors = {
        name: normal(shape, 0.1, 1.0) if len(shape) == 1 else normal(shape, 0.02)
        for name, shape in shapes.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")


def test_bitnet_2b_4t_against_transformers(tmp_path: Path) -> None:
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
    write(tmp_path / "m", config, shapes)
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
    assert relative_error(ours(mx.array([TOKENS]))[0], want) <= FEW_CODES


def _keep(seen: dict[str, Any], name: str, module: Any, inputs: Any, output: Any) -> None:
    seen[name] = mx.array(inputs[0].numpy()), mx.array(output.numpy())


def test_mmfreelm_2_7b_against_the_published_mathematics(tmp_path: Path) -> None:
    dims, inner, layers, vocabulary = 2_560, 6_912, 2, 32_000
    config = {
        "architectures": ["HGRNBitForCausalLM"],
        "model_type": "hgrn_bit",
        "attn_mode": "fused_recurrent",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "expand_ratio": 1,
        "hidden_act": "swish",
        "hidden_ratio": 4,
        "hidden_size": dims,
        "intermediate_size": None,
        "max_position_embeddings": 2_048,
        "num_heads": 1,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "share_conv_kernel": True,
        "tie_word_embeddings": False,
        "use_lower_bound": True,
        "use_short_conv": False,
        "vocab_size": vocabulary,
    }
    matrices = {"lm_head": (vocabulary, dims)}
    for n in range(layers):
        at = f"model.layers.{n}."
        matrices |= {f"{at}attn.{name}_proj": (dims, dims) for name in "ifgo"}
        matrices |= {f"{at}mlp.gate_proj": (2 * inner, dims), f"{at}mlp.down_proj": (dims, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (vocabulary, dims),
        "model.lower_bounds": (layers, dims),
        "model.norm.weight": (dims,),
    }
    for name, shape in matrices.items():
        shapes |= {f"{name}.weight": shape, f"{name}.norm.weight": shape[1:]}
    for n in range(layers):
        for name in ("attn_norm", "mlp_norm", "attn.g_norm"):
            shapes[f"model.layers.{n}.{name}.weight"] = (dims,)
    write(tmp_path / "m", config, shapes)
    weights = {
        name: np.array(array.astype(mx.float32))
        for name, array in mx.load(str(tmp_path / "m" / "model.safetensors")).items()
    }
    want = published_hgrn_bit.logits(weights, np.array(TOKENS), layers)
    del weights
    got = load_model(tmp_path / "m", dtype=mx.float32)(mx.array([TOKENS]))[0]
    assert relative_error(got, mx.array(want.astype(np.float32))[None]) <= ONE_CODE
