"""A GGUF file in the shape of BitNet-2B-4T with random weights, for llama.cpp to run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .benchmark_weights import presets

_BLOCK = 256
_SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class WrittenModel:
    """What a file holds.

    Attributes:
        name: Name to show with the results.
        config: Configuration of the same shape, as in a `config.json` of the Hub.
        macs: Number of multiply-accumulates for one token.
    """

    name: str
    config: Mapping[str, Any]
    macs: int


def write_model(file: Path, is_small: bool = False) -> WrittenModel:
    """Writes the file.

    As llama-quantize would do, the ternary layers are written as TQ2_0, and the embedding, which is
    also the head, as Q6_K.

    Args:
        file: The file to write.
        is_small: Whether to write two narrow blocks instead.
    """
    import gguf

    config = {**presets()["bitnet-2b-4t"], **(_SMALL if is_small else {})}
    writer = gguf.GGUFWriter(file, "bitnet")
    _add_header(writer, config)
    types = gguf.GGMLQuantizationType
    embedding = _q6_k(config["vocab_size"], config["hidden_size"])
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=types.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(config["hidden_size"], np.float32))
    norms, linears = _block_shapes(config)
    for n in range(config["num_hidden_layers"]):
        for name, size in norms.items():
            writer.add_tensor(f"blk.{n}.{name}.weight", np.ones(size, np.float32))
        for name, (outputs, inputs) in linears.items():
            weight = _tq2_0(outputs, inputs)
            writer.add_tensor(f"blk.{n}.{name}.weight", weight, raw_dtype=types.TQ2_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    block = sum(outputs * inputs for outputs, inputs in linears.values())
    head = config["vocab_size"] * config["hidden_size"]
    name = "small" if is_small else "BitNet-2B-4T"
    return WrittenModel(name, config, config["num_hidden_layers"] * block + head)


def _add_header(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(4096)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_tokenizer_model("no_vocab")


def _block_shapes(
    config: Mapping[str, Any],
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """The sizes of a block's norms, and the output and input dims of its linear layers."""
    dims, hidden_dims = config["hidden_size"], config["intermediate_size"]
    key_dims = dims // config["num_attention_heads"] * config["num_key_value_heads"]
    norms = {
        "attn_norm": dims,
        "attn_sub_norm": dims,
        "ffn_norm": dims,
        "ffn_sub_norm": hidden_dims,
    }
    linears = {
        "attn_q": (dims, dims),
        "attn_k": (key_dims, dims),
        "attn_v": (key_dims, dims),
        "attn_output": (dims, dims),
        "ffn_gate": (hidden_dims, dims),
        "ffn_up": (hidden_dims, dims),
        "ffn_down": (dims, hidden_dims),
    }
    return norms, linears


def _tq2_0(outputs: int, inputs: int) -> np.ndarray:
    """For 256 weights, 64 bytes with codes 0 to 2 and a float16 scale."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 3, (4, outputs * inputs // _BLOCK, 64), dtype=np.uint8)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    return _with_scale(packed, inputs**-0.5, outputs)


def _q6_k(outputs: int, inputs: int) -> np.ndarray:
    """For 256 weights, 192 bytes with codes, 16 bytes with scales and a float16 scale."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (outputs * inputs // _BLOCK, 208), dtype=np.uint8)
    blocks[:, 192:] = 1
    return _with_scale(blocks, inputs**-0.5 / 32, outputs)


def _with_scale(blocks: np.ndarray, scale: float, outputs: int) -> np.ndarray:
    scales = np.full((len(blocks), 1), scale, np.float16).view(np.uint8)
    return np.concatenate([blocks, scales], axis=1).reshape(outputs, -1)
