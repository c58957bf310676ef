"""A tiny Marian of weights by a formula, and searches with it that transformers was asked for."""

import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Searches = list[tuple[str, dict[str, Any] | None, dict[str, Any], list[str]]]

SIZE, DIMS, WIDTH, HEADS = 53, 28, 30, 4
PAD, END, LONGEST = SIZE - 1, 0, 12
CONFIG = {
    "architectures": ["MarianMTModel"],
    "model_type": "marian",
    "is_encoder_decoder": True,
    "vocab_size": SIZE,
    "decoder_vocab_size": SIZE,
    "d_model": DIMS,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDTH,
    "decoder_ffn_dim": WIDTH,
    "activation_function": "swish",
    "scale_embedding": False,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": PAD,
    "torch_dtype": "float32",
}
PUBLISHED = {
    "num_beams": 4,
    "max_length": LONGEST,
    "bad_words_ids": [[PAD]],
    "renormalize_logits": True,
    "forced_eos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
}
"""The `generation_config.json` of published models, without the length."""

SOURCES = ["39 17 46 24 2 31 9 38", "7 36 14"]
# made with transformers 5.24.0, the same in float32 and float64
SEARCHES: Searches = [
    ("c", {}, {}, ["24 12 24 29 24 2 24 13 18 31", "24 20 5 24 29 24"]),
    ("c", {"renormalize_logits": False}, {}, ["24 12 24 5 24 29 24 13 18 31", "24 20 5 24 29 24"]),
    ("c", {"num_beams": 6}, {}, ["24 12 24 5 24 29 24 13 18 31", "24 20 5 24 29 24"]),
    ("h", {"num_beams": 1}, {}, ["42 10 42 10 10 42 10 42 10 42", "42 42 42 42 42 42 42 42 42 42"]),
    (
        "c",
        {"length_penalty": 2.0},
        {},
        ["24 12 24 29 24 2 24 13 18 31", "24 20 5 24 29 24 29 24 29 24"],
    ),
    ("c", {"length_penalty": 0.0}, {}, ["", ""]),
    ("c", {"early_stopping": True}, {}, ["24 12 24 29 24", "24"]),
    (
        "c",
        {"early_stopping": "never"},
        {},
        ["24 12 24 29 24 2 24 13 18 31", "24 20 5 24 29 24 29 24 29 24"],
    ),
    ("c", {"max_length": 7}, {}, ["24 12 24 29 24", "24 20 5 24 45"]),
    (
        "c",
        {"forced_eos_token_id": None},
        {},
        ["24 12 24 29 24 2 24 42 24 41 24", "24 20 5 24 29 24"],
    ),
    (
        "h",
        {"forced_eos_token_id": None, "num_beams": 1},
        {},
        ["42 10 42 10 10 42 10 42 10 42 10", "42 42 42 42 42 42 42 42 42 42 42"],
    ),
    ("c", {"forced_eos_token_id": 5}, {}, ["24 12 24 29 24 2 24 13 18 31 5", "24 20 5 24 29 24"]),
    ("c", {"forced_bos_token_id": 7}, {}, ["7 2 24", "7 19"]),
    (
        "c",
        {"bad_words_ids": [[PAD], [24], [42], [13]]},
        {},
        ["39 12 38 12 38 12 23 18 31 18", "39"],
    ),
    (
        "c",
        {"bad_words_ids": [[PAD], [17, 25], [9, 29], [42, 10], [24, 12], [24, 20, 5]]},
        {},
        ["24 20 18 45 18 5 24 13 18 31", "24"],
    ),
    (
        "c",
        {"bad_words_ids": None},
        {},
        ["52 52 24 52 52 52 52 52 52 52", "52 52 52 52 52 52 52 52 52 52"],
    ),
    ("h", {"no_repeat_ngram_size": 2}, {}, ["42 19 42 10 10 42 42", "42 42 19 42"]),
    (
        "h",
        {"no_repeat_ngram_size": 3, "num_beams": 1},
        {},
        ["42 10 42 10 10 42 42 10", "42 42 42 19 42 42"],
    ),
    ("h", {"no_repeat_ngram_size": 1}, {}, ["19 42 10", "19 42"]),
    ("c", {"repetition_penalty": 1.3}, {}, ["24 12 24 45 18 5 24 13 18 31", "24"]),
    ("h", {"num_beams": 1, "repetition_penalty": 1.3}, {}, ["42 10 19 42 10 10", "42 19 42 10 42"]),
    ("c", {"min_length": 8}, {}, ["24 12 24 5 24 29 24 13 18 31", "24 20 5 24 29 24 29 24 29 24"]),
    (
        "c",
        {"min_new_tokens": 8},
        {},
        ["24 12 24 5 24 29 24 13 18 31", "24 20 5 24 29 24 29 24 29 24"],
    ),
    (
        "c",
        {"eos_token_id": [0, 13], "forced_eos_token_id": [0]},
        {},
        ["24 12 24 29 24 2 24", "24 20 5 24 29 24"],
    ),
    (
        "c",
        {"decoder_start_token_id": 3},
        {},
        ["24 12 24 12 38 12 2 24 13 18", "12 12 12 12 12 23 5 18 31 18"],
    ),
    ("c", {"suppress_tokens": [24, 17, 20, 42]}, {}, ["39 12 38 12 38 12 23 18 31 18", "39"]),
    (
        "c",
        {"begin_suppress_tokens": [24, 17, 20, 42, 13, 18]},
        {},
        ["39 12 24 12 38 12 23 18 31 18", ""],
    ),
    (
        "c",
        {
            "early_stopping": True,
            "forced_bos_token_id": 7,
            "length_penalty": 0.6,
            "min_length": 5,
            "no_repeat_ngram_size": 2,
            "repetition_penalty": 1.1,
        },
        {},
        ["7 2 24 12 38", "7 23 24 41"],
    ),
    (
        "c",
        None,
        {"num_beams": 4, "bad_words_ids": [[PAD]], "max_length": 12},
        ["24 12 24 5 24 29 24 13 18 31 24", "24 20 5 24 29 24"],
    ),
    (
        "c",
        None,
        {
            "num_beams": 4,
            "bad_words_ids": [[PAD]],
            "max_length": 12,
            "length_penalty": 0.5,
            "forced_eos_token_id": None,
        },
        ["", ""],
    ),
    (
        "h",
        {"num_beams": None},
        {"num_beams": 4},
        ["42 10 42 10 10 42 10 42 10 42", "42 42 42 42 42 42 42 42 42 42"],
    ),
]
"""A seed, changes of `PUBLISHED` (`None`: no file) and of `config.json`, and the tokens of each text."""


def numbers(shape: tuple[int, ...], name: str, scale: float) -> np.ndarray:
    """Floats within the scale, which depend on the name alone."""
    indices = np.arange(np.prod(shape), dtype=np.float64)
    values = np.sin(indices * 12.9898 + zlib.crc32(name.encode()) % 10007) * 43758.5453
    return ((values % 1 * 2 - 1) * scale).astype(np.float32).reshape(shape)


def searching_marian(folder: Path, seed: str, generation: Any, **config: Any) -> Path:
    """Writes it. `generation` goes to `generation_config.json`; `None` writes none."""
    folder.mkdir(parents=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for side in ("encoder", "decoder"):
        at = f"model.{side}.layers.0."
        for attention in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
            shapes |= {
                f"{at}{attention}.{name}_proj": (DIMS, DIMS) for name in ("q", "k", "v", "out")
            }
            shapes[f"{at}{attention}_layer_norm"] = (DIMS,)
        shapes |= {f"{at}fc1": (WIDTH, DIMS), f"{at}fc2": (DIMS, WIDTH)}
        shapes[f"{at}final_layer_norm"] = (DIMS,)
    tensors = {
        "model.shared.weight": numbers((SIZE, DIMS), f"{seed}shared", 0.7),
        "final_logits_bias": numbers((1, SIZE), f"{seed}bias", 0.5),
    }
    tensors["model.shared.weight"][PAD] = 0
    tensors["final_logits_bias"][0, [END, PAD]] = 2, 3
    for name, shape in shapes.items():
        scale = 2.0 / shape[-1] ** 0.5
        is_norm = len(shape) == 1
        weight = numbers(shape, seed + name, 1.5 if is_norm else scale)
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.bias"] = numbers(shape[:1], f"{seed}{name}b", 0.1)
    arrays = {name: mx.array(array) for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
