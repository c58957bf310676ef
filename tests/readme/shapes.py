"""The configurations behind the table of models, reduced to what decides memory."""

from typing import Any

from mlx_mmfree.evaluation.audit.skeleton import presets

CONTEXT = 2048
_PRESETS = presets()


def _transformer(base: str, sizes: tuple[int, ...], **more: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    return {**_PRESETS[base], **dict(zip(names, sizes, strict=True)), **more}


def _falcon(*sizes: int, head_dim: int) -> dict[str, Any]:
    return _transformer("falcon3-1b", sizes, head_dim=head_dim)


def _one_bit(*sizes: int) -> dict[str, Any]:
    return _transformer("bitnet-2b-4t", sizes)


SHAPES: dict[str, dict[str, Any]] = {
    "ridger/MMfreeLM-370M": dict(_PRESETS["mmfreelm-370m"]),
    "ridger/MMfreeLM-1.3B": dict(_PRESETS["mmfreelm-1.3b"]),
    "ridger/MMfreeLM-2.7B": dict(_PRESETS["mmfreelm-2.7b"]),
    "microsoft/bitnet-b1.58-2B-4T": dict(_PRESETS["bitnet-2b-4t"]),
    "1bitLLM/bitnet_b1_58-large": _one_bit(1536, 4096, 24, 16, 16, 32002),
    "1bitLLM/bitnet_b1_58-3B": _one_bit(3200, 8640, 26, 32, 32, 32002),
    "tiiuae/Falcon-E-1B-Instruct": _falcon(2048, 9216, 24, 16, 2, 32768, head_dim=128),
    "tiiuae/Falcon-E-3B-Instruct": _falcon(2048, 13312, 32, 16, 2, 32768, head_dim=128),
    "tiiuae/Falcon3-1B-Instruct-1.58bit": dict(_PRESETS["falcon3-1b"]),
    "tiiuae/Falcon3-3B-Instruct-1.58bit": _falcon(3072, 9216, 22, 12, 4, 131072, head_dim=256),
    "tiiuae/Falcon3-7B-Instruct-1.58bit": _falcon(3072, 23040, 28, 12, 4, 131072, head_dim=256),
    "tiiuae/Falcon3-10B-Instruct-1.58bit": _falcon(3072, 23040, 40, 12, 4, 131072, head_dim=256),
    "HF1BitLLM/Llama3-8B-1.58-100B-tokens": _falcon(4096, 14336, 32, 32, 8, 128256, head_dim=128),
}
