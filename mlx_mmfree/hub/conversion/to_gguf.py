"""Plans a GGUF file for llama.cpp or bitnet.cpp: its metadata, and the type and bytes of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError
from ...files.gguf_blocks import TYPES, encode, unpack_codes
from ...files.gguf_file import PlannedGGUFTensor
from ...files.tensors import tensor_bytes
from ...models import architecture_of
from ...models.parts.architecture import GGUFForm
from ...tokenizer.to_gguf import vocabulary_metadata
from ..checkpoint.checkpoint import record, rounding_of
from ..checkpoint.forms.affine import TERNARY_BITS
from ..checkpoint.gguf_checkpoint import FLOAT_TYPES
from ..checkpoint.gguf_config import (
    ROPE_FACTORS,
    file_name,
    find_form,
    rotation_refusal,
    scaling_factors,
    scaling_metadata,
)
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.weight_form import WRITER_KEY
from ..publish.runtimes import BITNET_CPP_ONLY
from .to_folder import FloatForms

FLOAT_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}
"""GGUF's names of the float dtypes."""

BLOCKS = {kind.name: kind.block for kind in TYPES.values()}
"""The inputs in a block, by the name of the type."""

_SCALE_KEYS = ("scale", "input_scale", "scales", "biases")


class TensorPlanner:
    """Plans tensors one by one.

    Args:
        reader: The source.
        form: What the file's architecture says.
        kind: The type of ternary matrices.
        dtype: The dtype of float matrices; `None` keeps each.
    """

    def __init__(self, reader: ParameterReader, form: GGUFForm, kind: str, dtype: mx.Dtype | None):
        self._reader = reader
        self._form = form
        self._kind = kind
        self._dtype = dtype

    def plan(self) -> list[PlannedGGUFTensor]:
        """All tensors of the file."""
        planned = map(self._plan, self._reader.shapes)
        return [*self._rotation(), *(tensor for tensor in planned if tensor is not None)]

    def not_held(self) -> list[str]:
        """The paths of the matrices with 2-bit codes that the type cannot hold."""
        return [
            path
            for path, module in self._reader.quantized.items()
            if module.bits == TERNARY_BITS
            and self._group_scales(path) is None
            and self._block_scales(path) is None
        ]

    def _plan(self, parameter: str) -> PlannedGGUFTensor | None:
        """The tensor of a parameter; `None` for scales, which are stored with their matrix."""
        path, _, key = parameter.rpartition(".")
        is_packed = path in self._reader.ternary or self._is_in_few_bits(path)
        if is_packed and key in _SCALE_KEYS:
            return None
        name = file_name(self._reader.names.to_disk(parameter), self._form)
        if key == "weight":
            if path in self._reader.ternary:
                return self._ternary(path, name)
            if (scales := self._group_scales(path)) is not None:
                return self._affine(path, name, scales)
            if (scales := self._block_scales(path)) is not None:
                return self._ternary_values(path, name, scales)
        return self._floats(parameter, name)

    def _rotation(self) -> list[PlannedGGUFTensor]:
        config = self._reader.model.config
        factors = scaling_factors(config.rotation, config.head_dim)
        if factors is None:
            return []
        data = factors.view(np.uint8)
        return [PlannedGGUFTensor(ROPE_FACTORS, "F32", factors.shape, lambda: data)]

    def _ternary(self, path: str, name: str) -> PlannedGGUFTensor:
        """A ternary linear, with one scale."""
        module = self._reader.ternary[path]

        def make() -> np.ndarray:
            weight, scale = self._reader.read_ternary(path)
            codes = unpack_codes(np.asarray(weight), module.input_dims)
            return encode(self._kind, self._ordered(codes, path), float(scale))

        return PlannedGGUFTensor(name, self._kind, (module.output_dims, module.input_dims), make)

    def _affine(self, path: str, name: str, scales: np.ndarray) -> PlannedGGUFTensor:
        """A matrix in MLX's affine form with ternary codes."""
        shape = self._reader.matrix_shape(path)

        def make() -> np.ndarray:
            codes = unpack_codes(np.asarray(self._reader.read(f"{path}.weight")), shape[1])
            return encode(self._kind, self._ordered(codes, path), self._ordered(scales, path))

        return PlannedGGUFTensor(name, self._kind, shape, make)

    def _ternary_values(self, path: str, name: str, scales: np.ndarray) -> PlannedGGUFTensor:
        """A dense linear whose values are ternary."""

        def make() -> np.ndarray:
            signs = mx.sign(self._reader.read_matrix(path)).astype(mx.int8)
            codes = (np.asarray(signs) + 1).astype(np.uint8)
            return encode(self._kind, self._ordered(codes, path), self._ordered(scales, path))

        return PlannedGGUFTensor(name, self._kind, self._reader.matrix_shape(path), make)

    def _floats(self, parameter: str, name: str) -> PlannedGGUFTensor:
        """A vector in float32, or any other matrix in a float dtype."""
        path = parameter.rpartition(".")[0]
        is_matrix = self._is_in_few_bits(path) and parameter.endswith(".weight")
        if is_matrix:
            shape: tuple[int, ...] = self._reader.matrix_shape(path)
            stored = self._reader.matrix_dtype(path)
        else:
            shape, stored = self._reader.shapes[parameter], self._reader.dtype(parameter)
        dtype = mx.float32 if len(shape) == 1 else self._dtype or stored

        def make() -> np.ndarray:
            array = self._reader.read_matrix(path) if is_matrix else self._reader.read(parameter)
            data = tensor_bytes(array.astype(dtype))
            return self._ordered(data.reshape(len(array), -1), path).reshape(-1)

        return PlannedGGUFTensor(name, FLOAT_NAMES[dtype], shape, make)

    def _is_in_few_bits(self, path: str) -> bool:
        """Whether a matrix with float activations is stored in few bits."""
        return path in self._reader.packed_dense or path in self._reader.quantized

    def _group_scales(self, path: str) -> np.ndarray | None:
        """The scale of each block of a matrix in MLX's affine form; `None` unless Q2_0 can hold it."""
        module = self._reader.quantized.get(path)
        if self._kind != "Q2_0" or module is None or module.bits != TERNARY_BITS:
            return None
        scales, biases = (
            np.asarray(self._reader.read(f"{path}.{key}").astype(mx.float32))
            for key in ("scales", "biases")
        )
        block = BLOCKS[self._kind]
        if module.group_size % block or np.any(scales != -biases):
            return None
        return np.repeat(scales, module.group_size // block, axis=1)

    def _block_scales(self, path: str) -> np.ndarray | None:
        """The scale of each block of b inputs of a dense linear with ternary values, `(N, D / b)`.

        `None` if the values are not ternary or do not fit. A matrix in I2_S would be read as one with
        8-bit activations.
        """
        packed = self._reader.ternary_values.get(path)
        block = BLOCKS[self._kind]
        if packed is None or self._kind == "I2_S" or packed.input_dims % block:
            return None
        scales = np.ones((packed.output_dims, packed.input_dims // block), np.float32)
        scales *= np.asarray(packed.scale)[:, None]
        if "input_scale" in packed:
            columns = np.asarray(packed.input_scale).reshape(-1, block)
            if np.any(columns != columns[:, :1]):
                return None
            scales *= columns[:, 0]
        return scales

    def _ordered(self, rows: np.ndarray, path: str) -> np.ndarray:
        """Rows in the order of the file, which may interleave the halves of each head."""
        config = self._reader.model.config
        heads = {"query_proj": config.num_attention_heads, "key_proj": config.num_key_value_heads}
        count = heads.get(path.rpartition(".")[2])
        if count is None or not self._form.rotates_pairs:
            return rows
        halves = rows.reshape(count, 2, len(rows) // count // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "I2_S": 40, "Q2_0": 41}
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GGUFPlan:
    """What a conversion writes to a GGUF file.

    Attributes:
        file_type: The type of the ternary tensors, or of the float matrices where none is ternary.
        metadata: The metadata.
        tensors: The tensors.
    """

    file_type: str
    metadata: dict[str, Any]
    tensors: list[PlannedGGUFTensor]


def plan_gguf(reader: ParameterReader, kind: str | None, forms: FloatForms, name: str) -> GGUFPlan:
    """Plans a GGUF file.

    Ternary linears take the type `kind`, vectors are float32, and other matrices stay floats.

    Args:
        reader: The source.
        kind: `TQ2_0`, `TQ1_0`, `Q2_0` or `I2_S`. `None` takes I2_S for the architecture that
            bitnet.cpp alone knows, and TQ2_0 for the others.
        forms: What becomes of float weights.
        name: The name of the model in the file.

    Raises:
        CheckpointError: The tokenizer files are missing or damaged.
        UnsupportedModelError: llama.cpp and bitnet.cpp do not know the architecture, or the type
            does not fit.
    """
    architecture = _architecture(reader)
    form = find_form({"general.architecture": architecture})
    kind = kind or ("I2_S" if architecture == BITNET_CPP_ONLY else "TQ2_0")
    planner = TensorPlanner(reader, form, kind, forms.dtype)
    _check(reader, kind, forms, architecture)
    _check_codes(reader, kind, planner)
    written_by = record(rounding_of(reader.checkpoint))
    floats = FLOAT_NAMES[forms.dtype or reader.activation_dtype]
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in _sizes(reader).items()},
        **{f"{WRITER_KEY}.{key}": value for key, value in written_by.items()},
        **vocabulary_metadata(reader.checkpoint.folder, reader.model.vocab_size),
    }
    tensors = planner.plan()
    is_ternary = any(tensor.kind == kind for tensor in tensors)
    file_type = kind if is_ternary else floats
    metadata["general.file_type"] = _FILE_TYPES[file_type]
    return GGUFPlan(file_type, metadata, tensors)


def _architecture(reader: ParameterReader) -> str:
    config = reader.model.config
    architecture = architecture_of(config)
    name = architecture.gguf_name(config)
    if name is None:
        raise UnsupportedModelError(
            f"[convert] 'to' must be mlx or hf for 'model_type' {architecture.name!r}, which neither "
            "llama.cpp nor bitnet.cpp knows, but got 'gguf'. Write one of the other forms."
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
    if (rule := rotation_refusal(config.rotation, architecture)) is not None:
        refused[rule] = True
    for rule, is_broken in refused.items():
        if is_broken:
            raise UnsupportedModelError(f"[convert] {rule} for GGUF. Write another form.")
    for path, module in reader.ternary.items():
        if module.input_dims % BLOCKS[kind]:
            raise UnsupportedModelError(
                f"[convert] 'gguf_type' must fit the {module.input_dims} inputs of "
                f"{reader.names.to_disk(path)!r} but {kind} takes multiples of {BLOCKS[kind]}. "
                "I2_S takes multiples of 128, Q2_0 of 64; other sizes have no ternary type."
            )


def _check_codes(reader: ParameterReader, kind: str, planner: TensorPlanner) -> None:
    """Refuses a type that cannot hold the 2-bit codes of the source."""
    if lost := planner.not_held():
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
    return sizes | scaling_metadata(config.rotation)
