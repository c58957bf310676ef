"""Models of published shapes with random weights, made without ever holding float matrices."""

import argparse
import json
from collections.abc import Mapping
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from mlx_mmfree.evaluation.audit.skeleton import config_dtype
from mlx_mmfree.evaluation.benchmark import measure_loaded
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.matrix import matrices, matrix_of
from mlx_mmfree.models import Decoder, check_causal, find
from mlx_mmfree.ops.ternary import CODES_PER_WORD, packed_width
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.platform.resident_memory import peak_resident_bytes

_ONE_IN_EACH_CODE = 0x55555555
# of the bits of two bfloat16 numbers, the signs, the fractions and two bits of the exponents are drawn:
# magnitudes from 2^-7 to 2^-3, since some processors are slow with denormal numbers
_DRAWN_HALVES, _SET_HALVES = 0x81FF81FF, 0x3C003C00
_GROUP = 64


def random_packed(output_dims: int, input_dims: int, seed: int = 0) -> mx.array:
    """Random packed trits, uint32 `(output_dims, packed_width(input_dims))`. Half of them are zero."""
    width = packed_width(input_dims)
    words = np.random.default_rng(seed).integers(0, 2**32, (output_dims, width), dtype=np.uint32)
    # code 3 stands for no trit and becomes code 1, which stands for zero
    words &= ~((words & (words >> 1) & np.uint32(_ONE_IN_EACH_CODE)) << 1)
    used = np.clip(input_dims - CODES_PER_WORD * np.arange(width), 0, CODES_PER_WORD)
    mask = ((np.uint64(1) << (2 * used).astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
    return mx.array((words & mask) | (~mask & np.uint32(_ONE_IN_EACH_CODE)))


def write_tokenizer(folder: Path, size: int) -> None:
    """Writes a byte-level BPE of `size` tokens that llama.cpp reads too.

    Its tokens are the 256 bytes, then a space with one, two and more letters, and an end. A word that
    a model of random weights writes becomes the same token again.
    """
    letters = sorted(ByteLevel.alphabet())
    spaced = ("".join(word) for n in count(1) for word in product(ascii_lowercase, repeat=n))
    words = [f"Ġ{word}" for word in islice(spaced, size - len(letters) - 1)]
    vocabulary = {token: n for n, token in enumerate([*letters, *words, "<end>"])}
    tokenizer = tokenizers.Tokenizer(BPE(vocabulary, [(word[:-1], word[-1]) for word in words]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def random_model(
    config: Mapping[str, Any], dtype: mx.Dtype | None = None, head_bits: int | None = None
) -> Decoder:
    """A model in its inference variant with random weights.

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


def has_dense_head(config: Mapping[str, Any]) -> bool:
    """Returns whether the head of a model, or the embedding that serves as its head, is not ternary."""
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
        fixed = () if matrix is None else matrix.fixed_dtypes
        for name, value in list(module.items()):
            # packed weights and a head of 16 bits stay as they are
            is_wide = isinstance(value, mx.array) and value.dtype == mx.float32
            is_parameter = not name.startswith("_")
            if is_wide and is_parameter and name not in fixed:
                module[name] = value.astype(dtype)
        # one module at a time, since a cast holds both formats in memory
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def add_config_flag(group: argparse._ActionsContainer) -> None:
    """Adds `--config`, which names models of published shapes, or files of configurations."""
    group.add_argument(
        "--config",
        nargs="+",
        default=[],
        help="models to measure with random weights: names of published shapes, as 'mmfree audit "
        "--help' lists them, or a config.json",
    )


def measure_random(
    name: str,
    config: Mapping[str, Any],
    head_bits: int | None = None,
    dtype: str | None = None,
    **amounts: Any,
) -> dict[str, Any]:
    """Measures a model of random weights as `mmfree bench` measures one from files."""
    keep_freed_memory()
    before = peak_resident_bytes()
    model = random_model(config, getattr(mx, dtype) if dtype else None, head_bits)
    check_causal(model)
    return measure_loaded(model, name, before, **amounts)
