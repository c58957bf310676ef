"""Checkpoints that transformers packs, saves and runs: the same logits from the same files."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.hub import load_model
from mlx_mmfree.layers import PackedBitLinear, PackedLinear
from tests.tolerances import TOLERANCE, relative_error

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

TOKENS = [[1, 7, 3, 39, 0]]
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DIVIDED = {"quant_method": "bitnet"}
MULTIPLIED = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "2B-4T": ("BitNet", {"tie_word_embeddings": True}, MULTIPLIED),
    "2B-4T-bf16": (
        "BitNet",
        {"tie_word_embeddings": True},
        MULTIPLIED | {"quantization_mode": "online"},
    ),
    "Llama3-8B-1.58": ("Llama", {"rope_theta": 500000.0}, DIVIDED),
    "Falcon3": ("Llama", {"head_dim": 32}, DIVIDED | {"modules_to_not_convert": ["lm_head"]}),
    "Falcon-E": ("Llama", {}, DIVIDED | {"modules_to_not_convert": ["lm_head"]}),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}, MULTIPLIED),
    "biased, divided": ("Llama", {"attention_bias": True, "mlp_bias": True}, DIVIDED),
    "biased Qwen3": ("Qwen3", {"attention_bias": True, "head_dim": 16}, MULTIPLIED),
}


def write(folder: Path, family: str) -> Any:
    """Writes a checkpoint with transformers' own packing and loads it there."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.integrations.bitnet import pack_weights

    kind, options, described = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    tensors = {}
    for name, weight in cls(config).state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(".bias"):
            tensors[name] = torch.randn(weight.shape)
        elif "_proj" in name and "quantization_mode" not in described:
            scale = weight.abs().mean().reshape(1)
            tensors[name] = pack_weights((weight / scale).round().clamp(-1, 1))
            is_multiplied = "linear_class" in described
            tensors[f"{name}_scale"] = scale if is_multiplied else 1 / scale
        else:
            tensors[name] = weight.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    keys = config.to_dict() | {"architectures": [cls.__name__], "quantization_config": described}
    (folder / "config.json").write_text(json.dumps(keys))
    return cls.from_pretrained(folder, dtype=torch.float32)


def logits_of(model: Any) -> mx.array:
    import torch

    with torch.no_grad():
        return mx.array(model(torch.tensor(TOKENS)).logits.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_by_transformers(tmp_path: Path, family: str) -> None:
    theirs = write(tmp_path / "m", family)
    want = logits_of(theirs)
    ours = load_model(tmp_path / "m", dtype=mx.float32)
    assert sum(isinstance(m, PackedBitLinear) for m in ours.modules()) == 14
    assert relative_error(ours(mx.array(TOKENS))[0], want) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("family", ["Llama3-8B-1.58", "Falcon3", "2B-4T-bf16"])
def test_saved_by_transformers(tmp_path: Path, family: str) -> None:
    theirs = write(tmp_path / "m", family)
    theirs.save_pretrained(tmp_path / "again")
    ours = load_model(tmp_path / "again", dtype=mx.float32)
    assert relative_error(ours(mx.array(TOKENS))[0], logits_of(theirs)) <= TOLERANCE[mx.float32]


def test_already_ternary(tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES | {"initializer_range": 1.0, "head_dim": 16})
    theirs = transformers.LlamaForCausalLM(config).half().float()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "_proj" in name:
                weight.copy_(weight.round().clamp(-1, 1) * 0.03125)
    theirs.save_pretrained(tmp_path / "m")
    ours = load_model(tmp_path / "m")
    assert sum(isinstance(m, PackedLinear) for m in ours.modules()) == 14
    assert relative_error(ours(mx.array(TOKENS))[0], logits_of(theirs)) <= TOLERANCE[mx.float32]


def test_packing_is_that_of_the_definition() -> None:
    import torch
    from transformers.integrations.bitnet import pack_weights

    from mlx_mmfree.hub.checkpoint.formats.bitnet import repack
    from mlx_mmfree.ops import pack_ternary

    trits = np.random.default_rng(0).integers(-1, 2, (12, 40)).astype(np.float32)
    packed = pack_weights(torch.tensor(trits))
    assert mx.array_equal(repack(mx.array(packed.numpy()), 12), pack_ternary(mx.array(trits)))
