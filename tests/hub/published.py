"""Writes tiny checkpoints in the exact formats that are published, from their definitions."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

BITNET = {"quant_method": "bitnet"}
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "use_cache": True,
    "transformers_version": "4.46.3",
}


@dataclass(frozen=True)
class Family:
    """One published format.

    Attributes:
        config: Further keys of `config.json`.
        stored: `packed` as transformers packs, `latent` masters, or `dense`, already ternary.
        dtype: The dtype of the floats.
        divides: Whether a packed scale divides.
        sub_norms: Hub names of the norms before the last projections.
        shards: Scales of an already ternary matrix.
        has_frequencies: Whether rotary frequencies are stored, which nobody reads.
    """

    config: dict[str, Any]
    stored: str
    dtype: mx.Dtype = mx.bfloat16
    divides: bool = True
    sub_norms: tuple[str, str] | None = None
    shards: int = 1
    has_frequencies: bool = False


@dataclass(frozen=True)
class Written:
    """The meaning of the linears of a written checkpoint: trits and scales by Hub name."""

    trits: dict[str, np.ndarray] = field(default_factory=dict)
    scales: dict[str, np.ndarray] = field(default_factory=dict)
    masters: dict[str, mx.array] = field(default_factory=dict)


def _sizes(hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 42,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_2B4T = {
    **_sizes(48, 108, 4, 1),
    "architectures": ["BitNetForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_bitnet.BitNetConfig",
        "AutoModelForCausalLM": "modeling_bitnet.BitNetForCausalLM",
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "relu2",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "bitnet",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_2B4T_NORMS = ("self_attn.attn_sub_norm", "mlp.ffn_sub_norm")


def _one_bit(**sizes: Any) -> Family:
    config = {
        **LLAMA,
        **sizes,
        "architectures": ["BitnetForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "input_bits": 8,
        "max_position_embeddings": 2048,
        "pad_token_id": 40,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "weight_bits": 1,
    }
    norms = ("self_attn.inner_attn_ln", "mlp.ffn_layernorm")
    return Family(config, "latent", mx.float32, sub_norms=norms, has_frequencies=True)


def _falcon(described: dict[str, Any] | None, **sizes: Any) -> dict[str, Any]:
    config = {
        **LLAMA,
        **sizes,
        "bos_token_id": 11,
        "eos_token_id": 11,
        "is_bitnet_config": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000042,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config if described is None else config | {"quantization_config": described}


def _trilm(shards: int) -> Family:
    config = {
        **LLAMA,
        **_sizes(192, 384, 6, 6, head_dim=32, dims_per_head=32),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "pretraining_model_parallel": shards,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_parallel_residual": False,
    }
    return Family(config, "dense", mx.float16, shards=shards)


_EXCLUDED = BITNET | {"modules_to_not_convert": ["lm_head"]}
_FALCON_E = _sizes(32, 144, 2, 1, head_dim=16)
FAMILIES: dict[str, Family] = {
    "bitnet-b1.58-2B-4T": Family(
        _2B4T
        | {
            "quantization_config": BITNET
            | {"linear_class": "autobitlinear", "quantization_mode": "offline"}
        },
        "packed",
        divides=False,
        sub_norms=_2B4T_NORMS,
    ),
    "bitnet-b1.58-2B-4T-bf16": Family(
        _2B4T | {"quantization_config": ONLINE}, "latent", sub_norms=_2B4T_NORMS
    ),
    # heads of 96, 64 and 100 dims; 5460 is 4 times an odd number, 8640 no multiple of 128
    "bitnet_b1_58-large": _one_bit(**_sizes(192, 64, 2, 2)),
    "bitnet_b1_58-xl": _one_bit(**_sizes(128, 4 * 27, 2, 2)),
    "bitnet_b1_58-3B": _one_bit(**_sizes(200, 64 * 3, 2, 2)),
    "Llama3-8B-1.58": Family(
        LLAMA
        | _sizes(32, 112, 4, 1)
        | {
            "bos_token_id": 1,
            "eos_token_id": 9,
            "is_bitnet_config": True,
            "max_position_embeddings": 8192,
            "quantization_config": BITNET,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        "packed",
    ),
    "Falcon3-1.58bit": Family(
        _falcon(_EXCLUDED, **_sizes(48, 96, 3, 1, head_dim=32))
        | {"auto_map": {"AutoConfig": "tiiuae/falcon3-7B--configuration_falcon3.Falcon3Config"}},
        "packed",
    ),
    "Falcon-E": Family(_falcon(_EXCLUDED, **_FALCON_E), "packed"),
    "Falcon-E prequantized": Family(_falcon(None, **_FALCON_E), "latent"),
    "Falcon-E bfloat16": Family(_falcon(None, **_FALCON_E), "dense"),
    **{f"TriLM of {shards}": _trilm(shards) for shards in (1, 2, 3, 6)},
}


def write_published(folder: Path, name: str) -> Written:
    """Writes one family's checkpoint."""
    family = FAMILIES[name]
    config, written = family.config, Written()
    rng = np.random.default_rng(5)
    dims, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", dims // config["num_attention_heads"])
    query, key = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    linears = {
        "self_attn.q_proj": (query, dims),
        "self_attn.k_proj": (key, dims),
        "self_attn.v_proj": (key, dims),
        "self_attn.o_proj": (dims, query),
        "mlp.gate_proj": (inner, dims),
        "mlp.up_proj": (inner, dims),
        "mlp.down_proj": (dims, inner),
    }
    norms = {"input_layernorm": dims, "post_attention_layernorm": dims}
    if family.sub_norms is not None:
        norms |= dict(zip(family.sub_norms, (query, inner), strict=True))
    tensors = {"model.embed_tokens.weight": _floats(rng, family, 42, dims)}
    tensors["model.norm.weight"] = _floats(rng, family, dims)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _floats(rng, family, 42, dims)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for norm, size in norms.items():
            tensors[f"{layer}.{norm}.weight"] = _floats(rng, family, size)
        if family.has_frequencies:
            tensors[f"{layer}.self_attn.rotary_emb.inv_freq"] = mx.ones((head // 2,))
        for linear, (rows, columns) in linears.items():
            tensors |= _linear(rng, family, f"{layer}.{linear}", rows, columns, written)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    text = json.dumps(config, indent=2)
    if name.startswith("Llama3"):
        # the published text names the section twice
        first = '{\n  "quantization_config": {"modules_to_not_convert": null},'
        text = first + text[1:]
    (folder / "config.json").write_text(text)
    return written


def _floats(rng: np.random.Generator, family: Family, *shape: int) -> mx.array:
    return mx.array(rng.normal(0, 0.5, shape).astype(np.float32)).astype(family.dtype)


def _linear(
    rng: np.random.Generator, family: Family, name: str, rows: int, columns: int, written: Written
) -> dict[str, mx.array]:
    """The tensors of one linear."""
    if family.stored == "latent":
        written.masters[name] = _floats(rng, family, rows, columns)
        return {f"{name}.weight": written.masters[name]}
    trits = rng.integers(-1, 2, (rows, columns))
    # every row and every column of each part has a trit that is not zero
    trits[:, :: max(1, columns // 6)] = 1
    trits[:: max(1, rows // 6)] = -1
    written.trits[name] = trits
    if family.stored == "packed":
        scale = mx.array([rng.uniform(0.01, 0.9)]).astype(family.dtype)
        stored = (1 / scale).astype(family.dtype) if family.divides else scale
        exact = np.array(stored.astype(mx.float32))
        written.scales[name] = 1 / exact if family.divides else exact
        quarter = rows // 4
        packed = np.zeros((quarter, columns), np.uint8)
        for row in range(rows):
            packed[row % quarter] |= (trits[row] + 1).astype(np.uint8) << 2 * (row // quarter)
        return {f"{name}.weight": mx.array(packed), f"{name}.weight_scale": stored}
    # the parts of a matrix were trained on devices of their own: rows, or columns before a sum
    is_by_column = name.endswith(("o_proj", "down_proj"))
    parts = np.array(
        mx.array(rng.uniform(0.01, 0.1, family.shards)).astype(family.dtype).astype(mx.float32)
    )
    scales = np.repeat(parts, (columns if is_by_column else rows) // family.shards)
    written.scales[name] = scales if is_by_column else scales[:, None]
    weight = (trits * written.scales[name]).astype(np.float32)
    return {f"{name}.weight": mx.array(weight).astype(family.dtype)}
