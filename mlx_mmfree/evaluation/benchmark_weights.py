"""Models with random weights for measurements, made without ever holding float matrices."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import CheckpointError
from ..layers import pack_linears
from ..layers.matrix import matrices, matrix_of
from ..models import Decoder, architectures, find
from ..models.parts.fields import dtype_name
from ..ops.ternary import CODES_PER_WORD, packed_width
from .benchmark_limits import held_arrays

_ONE_IN_EACH_CODE = 0x55555555
# of the bits of two bfloat16 numbers, the signs, the fractions and two bits of the exponents are drawn:
# magnitudes from 2^-7 to 2^-3, since some processors are slow with denormal numbers
_DRAWN_HALVES, _SET_HALVES = 0x81FF81FF, 0x3C003C00
_GROUP = 64
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def presets() -> dict[str, Mapping[str, Any]]:
    """The configurations of published models by name, reduced to what decides the arithmetic."""
    found = (each.presets for each in architectures().values())
    return {name: config for named in found for name, config in named.items()}


def random_packed(output_dims: int, input_dims: int, seed: int = 0) -> mx.array:
    """Random packed trits, uint32 `(output_dims, packed_width(input_dims))`. Half of them are zero."""
    width = packed_width(input_dims)
    words = np.random.default_rng(seed).integers(0, 2**32, (output_dims, width), dtype=np.uint32)
    # code 3 stands for no trit and becomes code 1, which stands for zero
    words &= ~((words & (words >> 1) & np.uint32(_ONE_IN_EACH_CODE)) << 1)
    used = np.clip(input_dims - CODES_PER_WORD * np.arange(width), 0, CODES_PER_WORD)
    mask = ((np.uint64(1) << (2 * used).astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
    return mx.array((words & mask) | (~mask & np.uint32(_ONE_IN_EACH_CODE)))


def random_model(
    config: Mapping[str, Any], dtype: mx.Dtype | None = None, head_bits: int | None = None
) -> Decoder:
    """A model in its inference form with random weights.

    Args:
        config: Configuration, as in a `config.json` of the Hub.
        dtype: Dtype of everything that is not packed; `None` takes the configuration's `dtype`,
            or float32 if it has none.
        head_bits: Bits of a head that is not ternary, or of the embedding that serves as head: 4, 6
            or 8 for quantised weights, 16 for bfloat16. `None` leaves the weights in `dtype`.

    Raises:
        CheckpointError: A value is missing, of the wrong type or out of bounds.
        UnsupportedModelError: The architecture is not supported.
    """
    architecture = find(config.get("model_type"))
    dtype = config_dtype(config) if dtype is None else dtype
    # MLX is lazy: these float matrices are replaced before they take memory
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    pack_linears(model)
    for seed, matrix in enumerate(matrices(model).values()):
        if matrix.is_ternary:
            layer = matrix.layer
            layer.weight = random_packed(matrix.output_dims, matrix.input_dims, seed)
            layer.scale = mx.full((1,), matrix.input_dims**-0.5)
    if head_bits is not None:
        _set_head(model, head_bits, dtype)
    _convert(model, dtype)
    return model


def config_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """The dtype that a configuration names, float32 where it names none."""
    name = dtype_name(config) or "float32"
    if name not in _DTYPES:
        raise CheckpointError(
            f"[config] 'dtype' must be one of {', '.join(_DTYPES)} but got {name!r}."
        )
    return _DTYPES[name]


def has_dense_head(config: Mapping[str, Any]) -> bool:
    """Whether the head of a model, or the embedding that serves as its head, is not ternary."""
    architecture = find(config.get("model_type"))
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    return _is_plain(model.head if "head" in model else model.embed)


def _is_plain(module: nn.Module) -> bool:
    matrix = matrix_of(module)
    return matrix is not None and matrix.is_plain


def random_head(
    output_dims: int, input_dims: int, bits: int, dtype: mx.Dtype = mx.float32
) -> nn.Module:
    """A linear layer of random bfloat16 weights (16 bits) or quantised weights in groups of 64."""
    if bits == 16:
        linear = nn.Linear(1, 1, bias=False)
        words = _random_words(output_dims, input_dims // 2)
        linear.weight = (words & _DRAWN_HALVES | _SET_HALVES).view(mx.bfloat16)
        return linear
    head = nn.QuantizedLinear(_GROUP, 1, bias=False, group_size=_GROUP, bits=bits)
    _set_codes(head, output_dims, input_dims, dtype)
    return head


def _set_head(model: Decoder, bits: int, dtype: mx.Dtype) -> None:
    output_dims, input_dims = model.embed.weight.shape
    if "head" in model:
        if _is_plain(model.head):
            model.head = random_head(output_dims, input_dims, bits, dtype)
        if dtype == mx.bfloat16:
            model.embed.weight = random_head(output_dims, input_dims, 16).weight
    elif _is_plain(model.embed):
        if bits == 16:
            model.embed.weight = random_head(output_dims, input_dims, bits).weight
        else:
            embed: Any = nn.QuantizedEmbedding(1, _GROUP, group_size=_GROUP, bits=bits)
            _set_codes(embed, output_dims, input_dims, dtype)
            model.embed = embed


def _set_codes(module: nn.Module, output_dims: int, input_dims: int, dtype: mx.Dtype) -> None:
    bits = module.bits
    module.weight = _random_words(output_dims, input_dims * bits // 32)
    largest = input_dims**-0.5
    module.scales = mx.full((output_dims, input_dims // _GROUP), 2 * largest / 2**bits, dtype)
    module.biases = mx.full(module.scales.shape, -largest, dtype)
    mx.eval(module.parameters())


def _random_words(rows: int, columns: int) -> mx.array:
    # rows repeat, so that hardly more memory is needed than for the result
    shape = (min(rows, 1024), columns)
    words = np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)
    return mx.take(mx.array(words), mx.arange(rows) % shape[0], axis=0)


def _convert(model: nn.Module, dtype: mx.Dtype) -> None:
    for module in model.modules():
        matrix = matrix_of(module)
        kept = () if matrix is None else matrix.kept
        for name, value in list(module.items()):
            # packed weights and a head of 16 bits stay as they are
            is_wide = isinstance(value, mx.array) and value.dtype == mx.float32
            is_parameter = not name.startswith("_")
            if is_wide and is_parameter and name not in kept:
                module[name] = value.astype(dtype)
        # one module at a time, since a cast holds both forms in memory
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def read_weights(model: Decoder) -> list[mx.array]:
    """The weight arrays that a decoded token reads as a whole."""
    unread = held_arrays(model.embed) if "head" in model else []
    return [array for array in held_arrays(model) if all(array is not other for other in unread)]


def ternary_macs(model: Decoder) -> int:
    """The multiply-accumulates of all ternary layers of the blocks for one token."""
    return sum(
        matrix.input_dims * matrix.output_dims
        for block in model.blocks
        for matrix in matrices(block).values()
        if matrix.is_ternary
    )


def head_macs(model: Decoder) -> int:
    """The multiply-accumulates of the head for one token."""
    return model.vocab_size * model.norm.weight.size
