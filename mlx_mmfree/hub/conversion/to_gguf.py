"""A checkpoint as a GGUF file for llama.cpp or bitnet.cpp."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError
from ...files.gguf.ternary import encode, unpack_codes
from ...files.gguf.types import TYPES
from ...files.gguf.writer import PlannedGGUFTensor
from ...files.safetensors_writer import tensor_bytes
from ...models import architecture_of
from ...models.parts.architecture import GGUFForm
from ...tokenizer.to_gguf import vocabulary_metadata
from ..checkpoint import gguf_rotation
from ..checkpoint.forms.affine_format import TERNARY_BITS
from ..checkpoint.forms.packed_format import WRITER_KEY
from ..checkpoint.gguf_checkpoint import FLOAT_TYPES
from ..checkpoint.gguf_config import file_name, find_form
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.writer_record import record, rounding_of
from .plan import FloatForms

_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "I2_S": 40, "Q2_0": 41}
_QUANTIZATION_VERSION = 2
_FLOAT_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}
_BLOCKS = {kind.name: kind.block for kind in TYPES.values()}
_SCALE_KEYS = ("scale", "input_scale", "scales", "biases")


@dataclass(frozen=True)
class GGUFPlan:
    """What a conversion writes.

    Attributes:
        metadata: The metadata.
        tensors: The tensors.
    """

    metadata: dict[str, Any]
    tensors: list[PlannedGGUFTensor]


def plan_gguf(reader: ParameterReader, kind: str, forms: FloatForms, name: str) -> GGUFPlan:
    """Plans a GGUF file.

    Ternary linears are of the type `kind`, vectors float32, other matrices floats as they are.

    Args:
        reader: The source.
        kind: `TQ2_0`, `TQ1_0`, `Q2_0` or `I2_S`.
        forms: What becomes of float weights.
        name: What the file says the model is called.

    Raises:
        CheckpointError: The tokenizer files are missing or damaged.
        UnsupportedModelError: llama.cpp and bitnet.cpp do not know the architecture, or the type
            does not fit.
    """
    architecture = _architecture(reader)
    form = find_form({"general.architecture": architecture})
    _check(reader, kind, forms, architecture)
    written_by = record(rounding_of(reader.checkpoint))
    floats = _FLOAT_NAMES[forms.dtype or reader.activation_dtype]
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in _sizes(reader).items()},
        **{f"{WRITER_KEY}.{key}": value for key, value in written_by.items()},
        **vocabulary_metadata(reader.checkpoint.folder, reader.model.vocab_size),
    }
    tensors = _rotation_tensors(reader)
    for parameter in reader.shapes:
        path, _, key = parameter.rpartition(".")
        stored = file_name(reader.names.to_disk(parameter), form)
        heads = _rotated_heads(reader, form, path)
        is_packed = path in reader.ternary or _is_written_out(reader, path)
        if is_packed and key in _SCALE_KEYS:
            continue
        scales = group_scales = None
        if key == "weight":
            group_scales = _group_scales(reader, path, kind)
            scales = _block_scales(reader, path, kind)
        if path in reader.ternary and key == "weight":
            tensors.append(_ternary_tensor(reader, path, stored, kind, heads))
        elif group_scales is not None:
            tensors.append(_affine_tensor(reader, path, stored, kind, heads, group_scales))
        elif scales is not None:
            tensors.append(_ternary_values_tensor(reader, path, stored, kind, heads, scales))
        else:
            tensors.append(_float_tensor(reader, parameter, stored, forms.dtype, heads))
    is_ternary = any(tensor.kind == kind for tensor in tensors)
    metadata["general.file_type"] = _FILE_TYPES[kind if is_ternary else floats]
    return GGUFPlan(metadata, tensors)


def _architecture(reader: ParameterReader) -> str:
    config = reader.model.config
    architecture = architecture_of(config)
    name = architecture.gguf_name(config)
    if name is None:
        raise UnsupportedModelError(
            f"[convert] 'to' must be mlx or hf for 'model_type' {architecture.name!r}, which neither "
            "llama.cpp nor bitnet.cpp knows, but got 'gguf'."
        )
    return name


def _check(reader: ParameterReader, kind: str, forms: FloatForms, architecture: str) -> None:
    config = reader.model.config
    refused = {
        "'embed_bits' and 'head_bits' must be left out": forms.embed_bits or forms.head_bits,
        "'ternarize' must be 'tensor', since a type has one scale,": forms.ternarize_groups,
        "linears must have no norm inside": config.linears and config.linears.norm_eps is not None,
        "linears must have no bias": config.attention_bias or config.mlp_bias,
    }
    if (rule := gguf_rotation.refusal(config.rotation, architecture)) is not None:
        refused[rule] = True
    for rule, is_broken in refused.items():
        if is_broken:
            raise UnsupportedModelError(f"[convert] {rule} for GGUF. Write another form.")
    for path, module in reader.ternary.items():
        if module.input_dims % _BLOCKS[kind]:
            raise UnsupportedModelError(
                f"[convert] 'gguf_type' must fit the {module.input_dims} inputs of "
                f"{reader.names.to_disk(path)!r} but {kind} takes multiples of {_BLOCKS[kind]}. "
                "I2_S takes multiples of 128, Q2_0 of 64; other sizes have no ternary type."
            )
    lost = [
        path
        for path, module in reader.quantized.items()
        if module.bits == TERNARY_BITS
        and _group_scales(reader, path, kind) is None
        and _block_scales(reader, path, kind) is None
    ]
    if lost:
        raise UnsupportedModelError(
            f"[convert] 'gguf_type' must hold the 2-bit codes of {reader.names.to_disk(lost[0])!r}, "
            f"with a scale for each {reader.quantized[lost[0]].group_size} inputs, but got {kind}. "
            "Q2_0 holds ternary codes with a scale for each 64 or 128 inputs."
        )


def _sizes(reader: ParameterReader) -> Mapping[str, Any]:
    config = reader.model.config
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rotation.theta,
    }
    return sizes | gguf_rotation.scaling_metadata(config.rotation)


def _rotation_tensors(reader: ParameterReader) -> list[PlannedGGUFTensor]:
    config = reader.model.config
    factors = gguf_rotation.scaling_factors(config.rotation, config.head_dim)
    if factors is None:
        return []
    data = factors.view(np.uint8)
    return [PlannedGGUFTensor(gguf_rotation.FACTORS, "F32", factors.shape, lambda: data)]


def _rotated_heads(reader: ParameterReader, form: GGUFForm, path: str) -> int | None:
    """Heads whose rows are stored pair by pair; `None` where the order stays."""
    if not form.rotates_pairs:
        return None
    config = reader.model.config
    heads = {"query_proj": config.num_attention_heads, "key_proj": config.num_key_value_heads}
    return heads.get(path.rpartition(".")[2])


def _by_pairs(rows: np.ndarray, heads: int | None) -> np.ndarray:
    """Rows with the halves of each head interleaved."""
    if heads is None:
        return rows
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _ternary_tensor(
    reader: ParameterReader, path: str, name: str, kind: str, heads: int | None
) -> PlannedGGUFTensor:
    module = reader.ternary[path]

    def make() -> np.ndarray:
        weight, scale = reader.read_ternary(path)
        codes = unpack_codes(np.asarray(weight), module.input_dims)
        return encode(kind, _by_pairs(codes, heads), float(scale))

    return PlannedGGUFTensor(name, kind, (module.output_dims, module.input_dims), make)


def _is_written_out(reader: ParameterReader, path: str) -> bool:
    """Whether a float matrix, or one without activation codes, is stored in few bits."""
    return path in reader.packed_dense or path in reader.quantized


def _group_scales(reader: ParameterReader, path: str, kind: str) -> np.ndarray | None:
    """The scale of each block of a matrix in MLX's affine form, as Q2_0 has them; `None`: it has not."""
    module = reader.quantized.get(path)
    if kind != "Q2_0" or module is None or module.bits != TERNARY_BITS:
        return None
    scales, biases = (
        np.asarray(reader.read(f"{path}.{key}").astype(mx.float32)) for key in ("scales", "biases")
    )
    block = _BLOCKS[kind]
    if module.group_size % block or np.any(scales != -biases):
        return None
    return np.repeat(scales, module.group_size // block, axis=1)


def _affine_tensor(
    reader: ParameterReader,
    path: str,
    name: str,
    kind: str,
    heads: int | None,
    scales: np.ndarray,
) -> PlannedGGUFTensor:
    shape = reader.matrix_shape(path)

    def make() -> np.ndarray:
        codes = unpack_codes(np.asarray(reader.read(f"{path}.weight")), shape[1])
        return encode(kind, _by_pairs(codes, heads), _by_pairs(scales, heads))

    return PlannedGGUFTensor(name, kind, shape, make)


def _block_scales(reader: ParameterReader, path: str, kind: str) -> np.ndarray | None:
    """The scale of each block of b inputs of a dense linear with ternary values, `(N, D / b)`.

    `None` where values are not ternary or do not fit. An I2_S matrix would be read as one with 8-bit
    activations.
    """
    packed = reader.ternary_values.get(path)
    block = _BLOCKS[kind]
    if packed is None or kind == "I2_S" or packed.input_dims % block:
        return None
    scales = np.ones((packed.output_dims, packed.input_dims // block), np.float32)
    scales *= np.asarray(packed.scale)[:, None]
    if "input_scale" in packed:
        columns = np.asarray(packed.input_scale).reshape(-1, block)
        if np.any(columns != columns[:, :1]):
            return None
        scales *= columns[:, 0]
    return scales


def _ternary_values_tensor(
    reader: ParameterReader,
    path: str,
    name: str,
    kind: str,
    heads: int | None,
    scales: np.ndarray,
) -> PlannedGGUFTensor:
    def make() -> np.ndarray:
        codes = (np.asarray(mx.sign(reader.read_matrix(path)).astype(mx.int8)) + 1).astype(np.uint8)
        return encode(kind, _by_pairs(codes, heads), _by_pairs(scales, heads))

    return PlannedGGUFTensor(name, kind, reader.matrix_shape(path), make)


def _float_tensor(
    reader: ParameterReader,
    parameter: str,
    name: str,
    dtype: mx.Dtype | None,
    heads: int | None,
) -> PlannedGGUFTensor:
    shape = reader.shapes[parameter]
    path = parameter.rpartition(".")[0]
    if _is_written_out(reader, path) and parameter.endswith(".weight"):
        shape, stored = reader.matrix_shape(path), reader.matrix_dtype(path)
    else:
        stored = reader.dtype(parameter)
    kept = mx.float32 if len(shape) == 1 else dtype or stored
    return PlannedGGUFTensor(
        name, _FLOAT_NAMES[kept], shape, partial(_float_bytes, reader, parameter, kept, heads)
    )


def _float_bytes(
    reader: ParameterReader, parameter: str, dtype: mx.Dtype, heads: int | None
) -> np.ndarray:
    path = parameter.rpartition(".")[0]
    is_matrix = _is_written_out(reader, path) and parameter.endswith(".weight")
    array = reader.read_matrix(path) if is_matrix else reader.read(parameter)
    array = array.astype(dtype)
    data = tensor_bytes(array)
    return data if heads is None else _by_pairs(data.reshape(len(array), -1), heads).reshape(-1)
