"""Writes small GGUF files from the definition of the format, sound or not."""

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants
from sentencepiece import SentencePieceProcessor

from mlx_mmfree.layers import BitLinear
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.ops import ternarize
from tests.hub.checkpoints import GOLDENS

TYPE_NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q8_0": 8,
    "BF16": 30,
    "TQ1_0": 34,
    "TQ2_0": 35,
    "I2_S": 36,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.inner_attn_ln": "attn_sub_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.ffn_layernorm": "ffn_sub_norm",
}
Stored = tuple[int, tuple[int, ...], bytes]


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """The type and the value of one entry of the metadata."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    # a negative number makes the type of all numbers a signed one
    kind = struct.unpack("<I", _value(min(value))[:4])[0] if value else 8
    content = b"".join(_value(entry)[4:] for entry in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + content


def write_gguf(
    file: Path, metadata: dict[str, Any], tensors: dict[str, Stored], version: int = 3
) -> Path:
    """Writes a file; a tensor is its type's number, its shape, rows first, and its bytes."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        header += _text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    file.write_bytes(header + bytes(-len(header) % 32) + data)
    return file


def stored(kind: str, array: mx.array | np.ndarray) -> Stored:
    """A tensor in one of the types that hold it."""
    values = np.array(array, np.float32)
    if kind == "I2_S":
        content = i2_s(values)
    else:
        content = quants.quantize(values, GGMLQuantizationType[kind]).tobytes()
    return TYPE_NUMBERS[kind], values.shape, content


def i2_s(values: np.ndarray) -> bytes:
    """In each 32 bytes, the bits 7-6 of byte `p` are value `p`, 5-4 `p + 32`, and so on."""
    scale = np.abs(values).max()
    codes = (np.sign(values) + 1).astype(np.uint8).reshape(-1, 4, 32)
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    return packed.tobytes() + np.full(8, scale, np.float32).tobytes()


def with_pairs_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as converters to GGUF put them, for rotations of neighbours."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """The Hub's name of a tensor as GGUF's."""
    module, _, key = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{key}"
    _, _, number, inner = module.split(".", 3)
    return f"blk.{number}.{_NAMES[inner]}.{key}"


def metadata_of(model: Decoder, architecture: str) -> dict[str, Any]:
    """The metadata of a model without its vocabulary."""
    config = model.config
    keys = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rotation.theta,
    }
    if architecture == "minicpm":
        keys |= {
            "embedding_scale": config.scale_emb,
            "residual_scale": config.scale_depth / config.num_hidden_layers**0.5,
            "logit_scale": config.hidden_size / config.dim_model_base,
        }
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture, "general.file_type": 40, **named}


def tensors_of(
    model: Decoder, architecture: str, linears: str, embedding: str = "F16"
) -> dict[str, Stored]:
    """The tensors of a model, with ternary linears as `trit * scale` and norms as F32."""
    names = WeightNames(find(model.config.model_type).weight_names)
    tensors = {}
    for path, module in model.named_modules():
        if "weight" not in module:
            continue
        name = names.to_disk(f"{path}.weight")
        weight = module.weight
        if isinstance(module, BitLinear):
            trits, scale = ternarize(weight)
            weight = trits * scale
        kind = linears if "_proj" in name else embedding
        both = {name: weight}
        if "bias" in module:
            both[name.removesuffix("weight") + "bias"] = module.bias
        for own, array in both.items():
            values = np.array(array.astype(mx.float32))
            if architecture in ("llama", "minicpm") and ("q_proj" in name or "k_proj" in name):
                config = model.config
                is_query = "q_proj" in name
                heads = config.num_attention_heads if is_query else config.num_key_value_heads
                values = with_pairs_together(values, heads)
            tensors[gguf_name(own)] = stored(kind if values.ndim == 2 else "F32", values)
    return tensors


def byte_level_metadata(pre: str | None = "llama-bpe") -> dict[str, Any]:
    """The vocabulary of the byte-level golden tokenizer."""
    folder = GOLDENS / "tokenizer_bpe"
    file = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = dict(file["model"]["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in file["added_tokens"]}
    special = {token["content"]: token["special"] for token in file["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = file["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{True: 3, False: 4}.get(special.get(t), 1) for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": vocabulary[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[settings["eos_token"]],
        "tokenizer.chat_template": settings["chat_template"],
    }
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata() -> dict[str, Any]:
    """The vocabulary of the SentencePiece golden tokenizer."""
    folder = GOLDENS / "tokenizer_spm"
    model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = range(model.get_piece_size())

    def kind(number: int) -> int:
        kinds = (model.is_unknown, model.is_control, model.is_unused, model.is_byte)
        return next(
            (n for n, is_kind in zip((2, 3, 5, 6), kinds, strict=True) if is_kind(number)), 1
        )

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(n) for n in ids],
        "tokenizer.ggml.scores": [float(model.get_score(n)) for n in ids],
        "tokenizer.ggml.token_type": [kind(n) for n in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": settings["chat_template"],
    }
