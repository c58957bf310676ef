"""Random weights for measurements: a ternary model that never had float matrices."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..layers import PackedBitLinear, pack_linears
from ..models import Decoder, find
from ..ops.ternary import CODES_PER_WORD, packed_width

_ONE_IN_EACH_CODE = 0x55555555

_MMFREE: dict[str, Any] = {"model_type": "hgrn_bit", "vocab_size": 32000, "use_lower_bound": True}

PRESETS: dict[str, dict[str, Any]] = {
    "mmfreelm-370m": _MMFREE | {"hidden_size": 1024, "num_hidden_layers": 24},
    "mmfreelm-1.3b": _MMFREE | {"hidden_size": 2048, "num_hidden_layers": 24},
    "mmfreelm-2.7b": _MMFREE | {"hidden_size": 2560, "num_hidden_layers": 32},
    "bitnet-2b-4t": {
        "model_type": "bitnet",
        "vocab_size": 128256,
        "hidden_size": 2560,
        "num_hidden_layers": 30,
        "intermediate_size": 6912,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}
"""The `config.json` of published models, reduced to what decides the arithmetic."""


def random_packed(output_dims: int, input_dims: int, seed: int = 0) -> mx.array:
    """Packed random trits, `uint32` `(output_dims, packed_width(input_dims))`; half are zero."""
    width = packed_width(input_dims)
    words = np.random.default_rng(seed).integers(0, 2**32, (output_dims, width), dtype=np.uint32)
    # no trit has code 3: it becomes code 1, a zero
    words &= ~((words & (words >> 1) & np.uint32(_ONE_IN_EACH_CODE)) << 1)
    used = np.clip(input_dims - CODES_PER_WORD * np.arange(width), 0, CODES_PER_WORD)
    mask = ((np.uint64(1) << (2 * used).astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
    return mx.array((words & mask) | (~mask & np.uint32(_ONE_IN_EACH_CODE)))


def random_model(config: Mapping[str, Any], dtype: mx.Dtype = mx.float32) -> Decoder:
    """A model in its inference form with random weights.

    Args:
        config: As a Hub `config.json`.
        dtype: Of everything that is not packed.

    Raises:
        CheckpointError: A value is missing, of the wrong type or out of bounds.
        UnsupportedModelError: The architecture is not implemented.
    """
    architecture = find(config.get("model_type"))
    # MLX is lazy: the float matrices that are drawn here are replaced before they take memory
    model: Decoder = architecture.build(architecture.Config.from_hub(config))
    pack_linears(model)
    for seed, module in enumerate(model.modules()):
        if isinstance(module, PackedBitLinear):
            module.weight = random_packed(module.output_dims, module.input_dims, seed)
            module.scale = mx.full((1,), module.input_dims**-0.5)
    _convert(model, dtype)
    return model


def _convert(model: nn.Module, dtype: mx.Dtype) -> None:
    for module in model.modules():
        kept = {"weight", "scale"} if isinstance(module, PackedBitLinear) else set()
        for name, value in list(module.items()):
            if isinstance(value, mx.array) and name not in kept:
                module[name] = value.astype(dtype)
        # one module at a time: casting needs both forms at once
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def token_bytes(model: Decoder) -> int:
    """Bytes of weights that one decoded token reads: all, but of a mere table of embeddings a row."""
    row = model.embed.weight[0].nbytes if "head" in model else 0
    return row + sum(array.nbytes for array in read_weights(model))


def read_weights(model: Decoder) -> list[mx.array]:
    """The weights that one decoded token reads as a whole."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    if "head" in model:
        del parameters["embed.weight"]
    return list(parameters.values())
