"""Plans GGUF files: the metadata, and the type and bytes of each tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError
from ...files.gguf_blocks import TYPES, TensorType, encode, unpack_codes
from ...files.gguf_file import PlannedGGUFTensor
from ...files.tensors import tensor_bytes
from ...layers.matrix import cast_weight, check_range
from ...layers.ternary.values import scales_of_blocks
from ...models import architecture_of
from ...models.parts.architecture import GGUFFormat
from ...tokenizer.sampling_defaults import sampling_to_gguf
from ...tokenizer.to_gguf import vocabulary_metadata
from ...version import __version__
from ..checkpoint import gguf_config
from ..checkpoint.embedding_files import pooling_of_files
from ..checkpoint.gguf_checkpoint import FLOAT_TYPES
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.weight_format import WRITER_KEY, rotated_format
from ..publish.runtimes import BITNET_CPP_ONLY
from .to_folder import FloatFormats, rotated_layers

FLOAT_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}
"""GGUF's names of the float dtypes."""

WRITTEN = {kind.name: kind for kind in TYPES.values() if kind.pack is not None}
"""The types that ternary tensors may have, by their names."""

_SCALE_KEYS = ("scale", "input_scale", "scales", "biases", "signs")


class TensorPlanner:
    """Plans tensors one by one.

    Args:
        reader: The source.
        format: What the file's architecture says.
        kind: The type of ternary matrices.
        formats: What becomes of float weights, and of a rotation.
    """

    def __init__(
        self, reader: ParameterReader, format: GGUFFormat, kind: TensorType, formats: FloatFormats
    ):
        self._reader = reader
        self._format = format
        self._kind = kind
        self._dtype = formats.dtype
        self._config = reader.model.config.to_hub()
        self._layouts = {**reader.layouts, **format.layouts(reader.model)}
        self._rotated = {} if formats.unrotate else rotated_layers(reader)

    def plan(self) -> list[PlannedGGUFTensor]:
        """All tensors of the file."""
        planned = {name: self._plan(name) for name in self._reader.shapes}
        tensors = [
            # the axes of the disk, as experts have one
            replace(each, shape=self._layouts[name].shape) if name in self._layouts else each
            for name, each in planned.items()
            if each is not None
        ]
        return [*self._rope_factors(), *tensors]

    def unsupported(self) -> list[str]:
        """The paths of the matrices with codes of 1 or 2 bits that the type cannot hold."""
        return [
            path
            for path in (*self._reader.few_bits, *self._rotated)
            if self._group_scales(path) is None and self._block_scales(path) is None
        ]

    def rotation(self) -> dict[str, Any]:
        """The metadata of rotated matrices.

        Raises:
            UnsupportedModelError: GGUF cannot say how they are rotated.
        """
        layers = {self._name(f"{path}.weight"): layer for path, layer in self._rotated.items()}
        signs = (np.asarray(self._reader.read(f"{path}.signs")) for path in self._rotated)
        is_tied = self._reader.model.config.tie_word_embeddings
        signs_of = dict(zip(layers, signs, strict=True))
        sorted_ = (self._sorted_heads(f"{path}.weight") for path in self._rotated)
        is_grouped = any(found is not None and found[0] == 1 for found in sorted_)
        return rotated_format().gguf_metadata(
            layers, signs_of, is_tied=is_tied, is_grouped=is_grouped
        )

    def _sorted_heads(self, parameter: str) -> tuple[int, np.ndarray] | None:
        """Like `GGUFFormat.heads`."""
        return self._format.heads(self._reader.names.to_disk(parameter), self._config)

    def _name(self, parameter: str) -> str:
        return gguf_config.file_name(self._reader.names.to_disk(parameter), self._format)

    def _plan(self, parameter: str) -> PlannedGGUFTensor | None:
        """The tensor of a parameter; `None` for scales, which are stored with their matrix."""
        path, _, key = parameter.rpartition(".")
        is_packed = path in self._reader.ternary or self._is_in_few_bits(path)
        if is_packed and key in _SCALE_KEYS:
            return None
        name = self._name(parameter)
        if key == "weight":
            if path in self._reader.ternary:
                return self._ternary(path, name)
            if (scales := self._group_scales(path)) is not None:
                return self._codes(path, name, scales)
            if (scales := self._block_scales(path)) is not None:
                return self._ternary_values(path, name, scales)
        return self._floats(parameter, name)

    def _rope_factors(self) -> list[PlannedGGUFTensor]:
        config = self._reader.model.config
        factors = gguf_config.scaling_factors(config.rotation, config.head_dim)
        if factors is None:
            return []
        data = factors.view(np.uint8)
        return [PlannedGGUFTensor(gguf_config.ROPE_FACTORS, "F32", factors.shape, lambda: data)]

    def _ternary(self, path: str, name: str) -> PlannedGGUFTensor:
        """A ternary linear, with one scale."""
        module = self._reader.ternary[path]

        def make() -> np.ndarray:
            weight, scale = self._reader.read_ternary(path)
            if not self._kind.has_one_scale:
                # it is stored in float16
                hint = "Write the type that holds float32 (--gguf-type i2_s)."
                check_range(scale.astype(mx.float16), scale, name, hint)
            codes = unpack_codes(np.asarray(weight), module.input_dims)
            return encode(self._kind, self._ordered(codes, f"{path}.weight"), float(scale))

        return PlannedGGUFTensor(
            name, self._kind.name, (module.output_dims, module.input_dims), make
        )

    def _codes(self, path: str, name: str, scales: np.ndarray) -> PlannedGGUFTensor:
        """A matrix whose codes are the type's own."""
        shape, (_, bits) = self._reader.matrix_shape(path), self._coded(path)

        def make() -> np.ndarray:
            codes = unpack_codes(np.asarray(self._reader.read(f"{path}.weight")), shape[1], bits)
            return encode(self._kind, self._ordered(codes, f"{path}.weight"), scales)

        return PlannedGGUFTensor(name, self._kind.name, shape, make)

    def _ternary_values(self, path: str, name: str, scales: np.ndarray) -> PlannedGGUFTensor:
        """A dense linear whose values are ternary."""

        def make() -> np.ndarray:
            signs = mx.sign(self._reader.read_matrix(path)).astype(mx.int8)
            codes = (np.asarray(signs) + 1).astype(np.uint8)
            return encode(self._kind, self._ordered(codes, f"{path}.weight"), scales)

        return PlannedGGUFTensor(name, self._kind.name, self._reader.matrix_shape(path), make)

    def _floats(self, parameter: str, name: str) -> PlannedGGUFTensor:
        """A matrix in a float dtype, or anything else in float32."""
        path = parameter.rpartition(".")[0]
        is_packed = self._is_in_few_bits(path) and parameter.endswith(".weight")
        if is_packed:
            shape: tuple[int, ...] = self._reader.matrix_shape(path)
            stored = self._reader.matrix_dtype(path)
        else:
            shape, stored = self._reader.shapes[parameter], self._reader.dtype(parameter)
        is_matrix = path in self._reader.matrices and len(shape) > 1
        dtype = self._dtype or stored
        if not is_matrix or parameter in self._reader.in_float32:
            dtype = mx.float32
        layout = self._layouts.get(parameter)

        def make() -> np.ndarray:
            array = self._reader.read_matrix(path) if is_packed else self._reader.read(parameter)
            array = array if layout is None else layout.write(array)
            array = cast_weight(array, dtype, self._reader.names.to_disk(parameter))
            numbers = tensor_bytes(array).view(f"<u{dtype.size}").reshape(array.shape)
            return self._ordered(numbers, parameter).reshape(-1).view(np.uint8)

        return PlannedGGUFTensor(name, FLOAT_NAMES[dtype], shape, make)

    def _is_in_few_bits(self, path: str) -> bool:
        """Returns whether a matrix with float activations is stored in few bits."""
        return path in self._reader.packed_dense or path in self._reader.quantized

    def _coded(self, path: str) -> tuple[int, int]:
        """Group size and bits of a matrix in codes, rotated or not; 0 of any other."""
        if path in self._rotated:
            return self._rotated[path].codes_group, self._rotated[path].bits
        module = self._reader.quantized.get(path)
        return (0, 0) if module is None else (module.group_size, module.bits)

    def _group_scales(self, path: str) -> np.ndarray | None:
        """The scale of each block of a matrix in codes, in the order of the file.

        `None` unless the type can hold it: code 0 stands for the negative scale, and code 1 for zero, or
        with 1 bit for the scale.
        """
        (group_size, bits), kind = self._coded(path), self._kind
        if not bits or bits != kind.code_bits or group_size % kind.block:
            return None
        scales, biases = (
            np.asarray(self._reader.read(f"{path}.{key}").astype(mx.float32))
            for key in ("scales", "biases")
        )
        if np.any(scales != -(2 if bits == 1 else 1) * biases):
            return None
        return self._ordered_scales(-biases, group_size, path)

    def _block_scales(self, path: str) -> np.ndarray | None:
        """The scale of each block of a dense linear with ternary values, in the order of the file.

        `None` if the values are not ternary or do not fit. A matrix in a type with one scale would be
        read as one with 8-bit activations.
        """
        packed = self._reader.ternary_values.get(path)
        if packed is None or self._kind.has_one_scale or not self._kind.has_zero:
            return None
        block = self._kind.block
        scales = scales_of_blocks(packed, block)
        return None if scales is None else self._ordered_scales(np.asarray(scales), block, path)

    def _ordered_scales(self, scales: np.ndarray, group: int, path: str) -> np.ndarray | None:
        """Scales of groups as scales of the file's blocks; `None` if a block has several."""
        block = self._kind.block
        wide = self._ordered(np.repeat(scales, group, axis=1), f"{path}.weight")
        blocks = wide.reshape(len(wide), -1, block)
        return blocks[..., 0] if np.all(blocks == blocks[..., :1]) else None

    def _ordered(self, numbers: np.ndarray, parameter: str) -> np.ndarray:
        """Numbers in the order of the file, which may interleave halves of heads, or sort heads."""
        path = parameter.rpartition(".")[0]
        counts = {"query_proj": "num_attention_heads", "key_proj": "num_key_value_heads"}
        count = counts.get(path.rpartition(".")[2])
        if count is not None and self._format.rotates_pairs:
            halves = numbers.reshape(self._config[count], 2, -1, *numbers.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
        found = self._sorted_heads(parameter)
        if found is None or (found[0] == 1 and path in self._rotated):
            return numbers
        axis, order = found
        return np.ascontiguousarray(np.take(numbers, np.argsort(order), axis))


_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GGUFPlan:
    """The plan of a GGUF file.

    Attributes:
        kind: The type of the ternary tensors, or of the float matrices where none is ternary.
        metadata: The metadata.
        tensors: The tensors.
    """

    kind: TensorType
    metadata: dict[str, Any]
    tensors: list[PlannedGGUFTensor]


def plan_gguf(
    reader: ParameterReader, kind: str | None, formats: FloatFormats, name: str
) -> GGUFPlan:
    """Plans a GGUF file.

    Ternary linears take the type `kind`, vectors are float32, and other matrices stay floats.

    Args:
        reader: The source.
        kind: A name of `WRITTEN`. `None` takes I2_S for the architecture that bitnet.cpp alone knows,
            and TQ2_0 for the others, or what holds the scales of groups.
        formats: What becomes of float weights.
        name: The name of the model in the file.

    Raises:
        CheckpointError: The tokenizer files are missing or damaged.
        UnsupportedModelError: llama.cpp and bitnet.cpp do not know the architecture, or the type
            does not fit.
    """
    architecture = _architecture(reader)
    format = gguf_config.find_format({"general.architecture": architecture})
    is_rotated = bool(rotated_layers(reader)) and not formats.unrotate
    is_chosen = kind is not None
    written = WRITTEN[kind or _usual_kind(architecture, is_rotated)]
    planner = TensorPlanner(reader, format, written, formats)
    if not (is_chosen or is_rotated) and (lost := planner.unsupported()):
        bits = reader.quantized[lost[0]].bits
        written = next(kind for kind in WRITTEN.values() if kind.code_bits == bits)
        planner = TensorPlanner(reader, format, written, formats)
    _check(reader, written, formats, architecture)
    _check_codes(reader, written, planner)
    floats = FLOAT_NAMES[formats.dtype or reader.activation_dtype]
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in _sizes(reader, format).items()},
        f"{WRITER_KEY}.version": __version__,
        **vocabulary_metadata(reader.checkpoint.folder, reader.model.vocab_size),
        **sampling_to_gguf(reader.checkpoint.folder),
    }
    if reader.model.pipeline == "feature-extraction":
        metadata[f"{architecture}.pooling_type"] = pooling_of_files(reader.checkpoint.folder)
    metadata |= planner.rotation()
    tensors = planner.plan()
    if not any(tensor.kind == written.name for tensor in tensors):
        written = next(kind for kind in TYPES.values() if kind.name == floats)
    metadata["general.file_type"] = written.file_type
    return GGUFPlan(written, metadata, tensors)


def _usual_kind(architecture: str, is_rotated: bool) -> str:
    if is_rotated:
        return rotated_format().gguf_type
    return "I2_S" if architecture == BITNET_CPP_ONLY else "TQ2_0"


def _architecture(reader: ParameterReader) -> str:
    config = reader.model.config
    architecture = architecture_of(config)
    name = architecture.gguf_name(config)
    if name is None:
        raise UnsupportedModelError(
            f"[convert] 'to' must be mlx or hf for 'model_type' {architecture.name!r}, which this "
            "library does not write as GGUF, but got 'gguf'. Write one of the other formats."
        )
    return name


def _check(
    reader: ParameterReader, kind: TensorType, formats: FloatFormats, architecture: str
) -> None:
    config = reader.model.config
    is_rotated = bool(rotated_layers(reader)) and not formats.unrotate
    refused = {
        "'embed_bits' and 'head_bits' must be left out": formats.embed_bits or formats.head_bits,
        "'unrotate' must be dense": isinstance(formats.unrotate, int),
        "'gguf_type' must be pq2_0, which no program knows that would leave the rotation out,": (
            is_rotated and kind.name != rotated_format().gguf_type
        ),
        f"'gguf_type' must not be {kind.name.lower()}, since bitnet.cpp has no such architecture,": (
            kind.has_one_scale and architecture == "qwen35" and reader.ternary
        ),
        "'ternarize' must be 'tensor', since a type has one scale,": formats.ternarize_groups,
        "linears must have no norm inside": config.linears and config.linears.norm_eps is not None,
        "linears must have no bias": config.attention_bias or config.mlp_bias,
    }
    if (rule := gguf_config.rotation_refusal(config.rotation, architecture)) is not None:
        refused[rule] = True
    for rule, is_broken in refused.items():
        if is_broken:
            raise UnsupportedModelError(f"[convert] {rule} for GGUF. Write another format.")
    for path, module in reader.ternary.items():
        if not kind.has_zero:
            raise UnsupportedModelError(
                f"[convert] 'gguf_type' must hold the zeros of {reader.names.to_disk(path)!r} but "
                f"{kind.name} holds signs alone. Take TQ2_0, TQ1_0, Q2_0 or I2_S."
            )
        if module.input_dims % kind.block:
            raise UnsupportedModelError(
                f"[convert] 'gguf_type' must fit the {module.input_dims} inputs of "
                f"{reader.names.to_disk(path)!r} but {kind.name} takes multiples of {kind.block}. "
                "I2_S takes multiples of 128, Q2_0 of 64; other sizes have no ternary type."
            )


def _check_codes(reader: ParameterReader, kind: TensorType, planner: TensorPlanner) -> None:
    """Refuses a type that cannot hold the codes of 1 or 2 bits of the source."""
    if lost := planner.unsupported():
        module = reader.quantized.get(lost[0])
        if module is None:
            raise UnsupportedModelError(
                "[convert] 'unrotate' (--unrotate) must be given for the rotated codes of "
                f"{reader.names.to_disk(lost[0])!r}, which {kind.name} does not hold, but was left out. "
                f"{rotated_format().gguf_type} holds codes of 2 bits with a scale for each 128 inputs."
            )
        raise UnsupportedModelError(
            f"[convert] 'gguf_type' must hold the {module.bits}-bit codes of "
            f"{reader.names.to_disk(lost[0])!r}, with a scale for each {module.group_size} inputs, but "
            f"got {kind.name}. Q2_0 holds ternary codes with a scale for each 64 or 128 inputs, and "
            "Q1_0 signs with one for each 128."
        )


def _sizes(reader: ParameterReader, format: GGUFFormat) -> Mapping[str, Any]:
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
    return {**sizes, **gguf_config.scaling_metadata(config.rotation), **format.write(config)}
