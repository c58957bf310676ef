"""Converts a checkpoint to another form, tensor by tensor, and compares the result with its source."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError
from ...files.checkpoint_files import CONFIG_FILE, SCALES_FILE
from ...files.gguf_blocks import TYPES, encode, unpack_codes
from ...files.gguf_file import PlannedGGUFTensor, write_parts
from ...files.reading import real_path, tokenizer_files, write_json
from ...files.tensors import PlannedTensors, tensor_bytes, write_safetensors, write_shards
from ...files.writing import new_folder, writing
from ...layers.matrix import cast_weight, check_range
from ...layers.ternary.values import scales_of_blocks
from ...models import architecture_of
from ...models.parts.architecture import GGUFForm
from ...platform.progress import Progress
from ...tokenizer.sampling_defaults import sampling_to_gguf
from ...tokenizer.to_gguf import compare_tokenizers, vocabulary_metadata
from ...version import __version__
from ..checkpoint import gguf_config
from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.embedding_files import pooling_of_files
from ..checkpoint.gguf_checkpoint import FLOAT_TYPES
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.save import check_target, copy_files, token_ids
from ..checkpoint.weight_form import WRITER_KEY, rotated_form
from ..publish.model_card import ModelCard, write_model_card
from ..publish.runtimes import BITNET_CPP_ONLY, openings
from .to_folder import MODEL_FILE, FloatForms, FolderPlan, plan_hf, plan_mlx, rotated_layers
from .verify import Report, take_stock, verify

FLOAT_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}
"""GGUF's names of the float dtypes."""

KINDS = {kind.name: kind for kind in TYPES.values()}
"""The types by their names."""

_SCALE_KEYS = ("scale", "input_scale", "scales", "biases", "signs")


class TensorPlanner:
    """Plans tensors one by one.

    Args:
        reader: The source.
        form: What the file's architecture says.
        kind: The type of ternary matrices.
        forms: What becomes of float weights, and of a rotation.
    """

    def __init__(self, reader: ParameterReader, form: GGUFForm, kind: str, forms: FloatForms):
        self._reader = reader
        self._form = form
        self._kind = kind
        self._dtype = forms.dtype
        self._config = reader.model.config.to_hub()
        self._layouts = {**reader.layouts, **form.layouts(reader.model)}
        self._rotated = {} if forms.unrotate else rotated_layers(reader)

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

    def not_held(self) -> list[str]:
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
        return rotated_form().gguf_metadata(
            layers, signs_of, is_tied=is_tied, is_grouped=is_grouped
        )

    def _sorted_heads(self, parameter: str) -> tuple[int, np.ndarray] | None:
        """As `GGUFForm.heads`."""
        return self._form.heads(self._reader.names.to_disk(parameter), self._config)

    def _name(self, parameter: str) -> str:
        return gguf_config.file_name(self._reader.names.to_disk(parameter), self._form)

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
            if self._kind != "I2_S":
                # the other types hold it in float16
                way_out = "Write the type that holds float32 (--gguf-type i2_s)."
                check_range(scale.astype(mx.float16), scale, name, way_out)
            codes = unpack_codes(np.asarray(weight), module.input_dims)
            return encode(self._kind, self._ordered(codes, f"{path}.weight"), float(scale))

        return PlannedGGUFTensor(name, self._kind, (module.output_dims, module.input_dims), make)

    def _codes(self, path: str, name: str, scales: np.ndarray) -> PlannedGGUFTensor:
        """A matrix whose codes are the type's own."""
        shape, (_, bits) = self._reader.matrix_shape(path), self._coded(path)

        def make() -> np.ndarray:
            codes = unpack_codes(np.asarray(self._reader.read(f"{path}.weight")), shape[1], bits)
            return encode(self._kind, self._ordered(codes, f"{path}.weight"), scales)

        return PlannedGGUFTensor(name, self._kind, shape, make)

    def _ternary_values(self, path: str, name: str, scales: np.ndarray) -> PlannedGGUFTensor:
        """A dense linear whose values are ternary."""

        def make() -> np.ndarray:
            signs = mx.sign(self._reader.read_matrix(path)).astype(mx.int8)
            codes = (np.asarray(signs) + 1).astype(np.uint8)
            return encode(self._kind, self._ordered(codes, f"{path}.weight"), scales)

        return PlannedGGUFTensor(name, self._kind, self._reader.matrix_shape(path), make)

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
        """Whether a matrix with float activations is stored in few bits."""
        return path in self._reader.packed_dense or path in self._reader.quantized

    def _coded(self, path: str) -> tuple[int, int]:
        """Group size and bits of a matrix in codes, rotated or not; 0 of any other."""
        if path in self._rotated:
            return self._rotated[path].codes_group, self._rotated[path].bits
        module = self._reader.quantized.get(path)
        return (0, 0) if module is None else (module.group_size, module.bits)

    def _group_scales(self, path: str) -> np.ndarray | None:
        """The scale of each block of a matrix in codes, in the order of the file.

        `None` unless the type can hold it: code 0 stands for the negative scale, in Q2_0 code 1 for zero
        and in Q1_0 for the scale.
        """
        (group_size, bits), kind = self._coded(path), KINDS[self._kind]
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

        `None` if the values are not ternary or do not fit. A matrix in I2_S would be read as one with
        8-bit activations, and Q1_0 has no zero.
        """
        packed = self._reader.ternary_values.get(path)
        if packed is None or self._kind in ("I2_S", "Q1_0"):
            return None
        block = KINDS[self._kind].block
        scales = scales_of_blocks(packed, block)
        return None if scales is None else self._ordered_scales(np.asarray(scales), block, path)

    def _ordered_scales(self, scales: np.ndarray, group: int, path: str) -> np.ndarray | None:
        """Scales of groups as scales of the file's blocks; `None` if a block has several."""
        block = KINDS[self._kind].block
        wide = self._ordered(np.repeat(scales, group, axis=1), f"{path}.weight")
        blocks = wide.reshape(len(wide), -1, block)
        return blocks[..., 0] if np.all(blocks == blocks[..., :1]) else None

    def _ordered(self, numbers: np.ndarray, parameter: str) -> np.ndarray:
        """Numbers in the order of the file, which may interleave halves of heads, or sort heads."""
        path = parameter.rpartition(".")[0]
        counts = {"query_proj": "num_attention_heads", "key_proj": "num_key_value_heads"}
        count = counts.get(path.rpartition(".")[2])
        if count is not None and self._form.rotates_pairs:
            halves = numbers.reshape(self._config[count], 2, -1, *numbers.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
        found = self._sorted_heads(parameter)
        if found is None or (found[0] == 1 and path in self._rotated):
            return numbers
        axis, places = found
        return np.ascontiguousarray(np.take(numbers, np.argsort(places), axis))


_FILE_TYPES = {
    **{"F32": 0, "F16": 1, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "I2_S": 40},
    **{"Q1_0": 40, "Q2_0": 41, "PQ2_0": 142},
}
"""The numbers of `general.file_type`. bitnet.cpp and llama.cpp gave one of them to two types."""
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GGUFPlan:
    """The plan of a GGUF file.

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
        kind: `TQ2_0`, `TQ1_0`, `Q2_0`, `Q1_0` or `I2_S`. `None` takes I2_S for the architecture
            that bitnet.cpp alone knows, and TQ2_0 for the others, or what holds the scales of groups.
        forms: What becomes of float weights.
        name: The name of the model in the file.

    Raises:
        CheckpointError: The tokenizer files are missing or damaged.
        UnsupportedModelError: llama.cpp and bitnet.cpp do not know the architecture, or the type
            does not fit.
    """
    architecture = _architecture(reader)
    form = gguf_config.find_form({"general.architecture": architecture})
    is_rotated = bool(rotated_layers(reader)) and not forms.unrotate
    is_chosen, kind = kind is not None, kind or _usual_kind(architecture, is_rotated)
    planner = TensorPlanner(reader, form, kind, forms)
    if not (is_chosen or is_rotated) and (lost := planner.not_held()):
        kind = "Q1_0" if reader.quantized[lost[0]].bits == 1 else "Q2_0"
        planner = TensorPlanner(reader, form, kind, forms)
    _check(reader, kind, forms, architecture)
    _check_codes(reader, kind, planner)
    floats = FLOAT_NAMES[forms.dtype or reader.activation_dtype]
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in _sizes(reader, form).items()},
        f"{WRITER_KEY}.version": __version__,
        **vocabulary_metadata(reader.checkpoint.folder, reader.model.vocab_size),
        **sampling_to_gguf(reader.checkpoint.folder),
    }
    if reader.model.pipeline == "feature-extraction":
        metadata[f"{architecture}.pooling_type"] = pooling_of_files(reader.checkpoint.folder)
    metadata |= planner.rotation()
    tensors = planner.plan()
    is_ternary = any(tensor.kind == kind for tensor in tensors)
    file_type = kind if is_ternary else floats
    metadata["general.file_type"] = _FILE_TYPES[file_type]
    return GGUFPlan(file_type, metadata, tensors)


def _usual_kind(architecture: str, is_rotated: bool) -> str:
    if is_rotated:
        return rotated_form().gguf_type
    return "I2_S" if architecture == BITNET_CPP_ONLY else "TQ2_0"


def _architecture(reader: ParameterReader) -> str:
    config = reader.model.config
    architecture = architecture_of(config)
    name = architecture.gguf_name(config)
    if name is None:
        raise UnsupportedModelError(
            f"[convert] 'to' must be mlx or hf for 'model_type' {architecture.name!r}, which this "
            "library does not write as GGUF, but got 'gguf'. Write one of the other forms."
        )
    return name


def _check(reader: ParameterReader, kind: str, forms: FloatForms, architecture: str) -> None:
    config = reader.model.config
    is_rotated = bool(rotated_layers(reader)) and not forms.unrotate
    refused = {
        "'embed_bits' and 'head_bits' must be left out": forms.embed_bits or forms.head_bits,
        "'unrotate' must be dense": isinstance(forms.unrotate, int),
        "'gguf_type' must be pq2_0, which no program knows that would leave the rotation out,": (
            is_rotated and kind != rotated_form().gguf_type
        ),
        "'gguf_type' must not be i2_s, since bitnet.cpp has no such architecture,": (
            kind == "I2_S" and architecture == "qwen35" and reader.ternary
        ),
        "'ternarize' must be 'tensor', since a type has one scale,": forms.ternarize_groups,
        "linears must have no norm inside": config.linears and config.linears.norm_eps is not None,
        "linears must have no bias": config.attention_bias or config.mlp_bias,
    }
    if (rule := gguf_config.rotation_refusal(config.rotation, architecture)) is not None:
        refused[rule] = True
    for rule, is_broken in refused.items():
        if is_broken:
            raise UnsupportedModelError(f"[convert] {rule} for GGUF. Write another form.")
    for path, module in reader.ternary.items():
        if kind == "Q1_0":
            raise UnsupportedModelError(
                f"[convert] 'gguf_type' must hold the zeros of {reader.names.to_disk(path)!r} but Q1_0 "
                "holds signs alone. Take TQ2_0, TQ1_0, Q2_0 or I2_S."
            )
        if module.input_dims % KINDS[kind].block:
            raise UnsupportedModelError(
                f"[convert] 'gguf_type' must fit the {module.input_dims} inputs of "
                f"{reader.names.to_disk(path)!r} but {kind} takes multiples of {KINDS[kind].block}. "
                "I2_S takes multiples of 128, Q2_0 of 64; other sizes have no ternary type."
            )


def _check_codes(reader: ParameterReader, kind: str, planner: TensorPlanner) -> None:
    """Refuses a type that cannot hold the codes of 1 or 2 bits of the source."""
    if lost := planner.not_held():
        module = reader.quantized.get(lost[0])
        if module is None:
            raise UnsupportedModelError(
                "[convert] 'unrotate' (--unrotate) must be given for the rotated codes of "
                f"{reader.names.to_disk(lost[0])!r}, which {kind} does not hold, but was left out. "
                f"{rotated_form().gguf_type} holds those of 2 bits with a scale for each 128 inputs."
            )
        raise UnsupportedModelError(
            f"[convert] 'gguf_type' must hold the {module.bits}-bit codes of "
            f"{reader.names.to_disk(lost[0])!r}, with a scale for each {module.group_size} inputs, but "
            f"got {kind}. Q2_0 holds ternary codes with a scale for each 64 or 128 inputs, and Q1_0 "
            "signs with one for each 128."
        )


def _sizes(reader: ParameterReader, form: GGUFForm) -> Mapping[str, Any]:
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
    return {**sizes, **gguf_config.scaling_metadata(config.rotation), **form.write(config)}


Target = Literal["mlx", "hf", "gguf"]
OnBytes = Callable[[int], object]
TritsPerByte = Literal[4, 5]
GGUFType = Literal["tq2_0", "tq1_0", "q2_0", "pq2_0", "q1_0", "i2_s"]


def convert(
    source: Checkpoint,
    path: str | os.PathLike[str],
    *,
    to: Target = "mlx",
    gguf_type: GGUFType | None = None,
    forms: FloatForms | None = None,
    trits_per_byte: TritsPerByte = 4,
    max_part_bytes: int | None = None,
    check: bool = True,
    overwrite: bool = False,
    show_progress: bool = False,
    card: ModelCard | None = None,
) -> Report:
    """Writes a checkpoint in another form. Ternary weights do not change.

    Tensors are read, converted and written one after the other. The folder appears under its name only
    when it is complete and, with `check`, was found to be equal to its source.

    Args:
        source: The checkpoint.
        path: The folder to make.
        to: The form: MLX's, transformers', or GGUF.
        gguf_type: The type of ternary tensors in GGUF. Default: `i2_s` for BitNet's own architecture,
            which bitnet.cpp alone knows, and `tq2_0` for the others, or `q2_0` or `q1_0` where groups of
            inputs have scales of their own.
        forms: What becomes of weights that are stored as floats. Default: they stay.
        trits_per_byte: How many ternary weights share a byte in MLX's form: 4, which mlx-lm computes
            with, or 5, which are unpacked when they are read.
        max_part_bytes: The largest number of bytes of tensors in a file of a GGUF model, unless one
            tensor is larger. `None` writes one file.
        check: Read the result again, and compare every tensor and the logits of a fixed input.
        overwrite: Replace an existing checkpoint folder.
        show_progress: Show how much is written: a bar on a terminal, and elsewhere a line at times.
        card: What the model card says of the source; the rest is filled in. `None` writes no card.

    Returns:
        What was written, and how it compares with the source.

    Raises:
        CheckpointError: The source is damaged or holds an adapter, the target exists, the disk is full,
            or the result differs from its source.
        UnsupportedModelError: The form does not exist for this model.

    Example:
        >>> from mlx_mmfree import demo
        >>> report = convert(open_checkpoint(demo.path()), "converted", check=False)
        >>> load_model("converted").dims
        384
    """
    forms = forms or FloatForms()
    target = real_path(path)
    source.refuse_adapter("convert", "to be written in another form")
    files = {entry.file for entry in source.tensors.values()}
    check_target(target, overwrite, "convert", [source.folder, *files])
    reader = ParameterReader(source)
    if source.dtype is not None and forms.dtype is None:
        forms = replace(forms, dtype=source.dtype)
        reader.keep_floats()
    if to == "gguf":
        kind = gguf_type.upper() if gguf_type is not None else None
        writer = _gguf_writer(reader, target.name, kind, forms, max_part_bytes)
    else:
        plan_packed = partial(plan_mlx, trits_per_byte=trits_per_byte)
        writer = _folder_writer(reader, plan_packed if to == "mlx" else plan_hf, forms)
    made = new_folder(target, replaces=overwrite, needed_bytes=writer.nbytes)
    with writing("convert", target), made as folder:
        with Progress("writing", writer.nbytes, "B", is_shown=show_progress) as bar:
            writer.write(folder, bar.update)
        written = ParameterReader(open_checkpoint(folder))
        report = take_stock(reader, written)
        if check:
            report = verify(reader, written, forms, writer.scale_dtype)
            writer.check_files(source.folder, written.checkpoint.folder)
        report.openings = openings(written, to, writer.file_type)
        if card is not None:
            write_model_card(folder, _filled(card, to, report, written))
    return report


@dataclass(frozen=True)
class _Writer:
    """One planned conversion.

    Attributes:
        nbytes: The number of bytes to write.
        write: Writes the files into a folder, and calls a function with the bytes of each tensor.
        check_files: Compares the tokenizers of the source's folder and of the written one.
        scale_dtype: The dtype in which the form holds the scale of a ternary matrix.
        file_type: The type of the tensors in GGUF, and empty for other forms.
    """

    nbytes: int
    write: Callable[[Path, OnBytes], None]
    check_files: Callable[[Path, Path], None] = lambda source, target: None
    scale_dtype: mx.Dtype = mx.float32
    file_type: str = ""


def _folder_writer(
    reader: ParameterReader,
    make_plan: Callable[[ParameterReader, FloatForms], FolderPlan],
    forms: FloatForms,
) -> _Writer:
    plan = make_plan(reader, forms)
    copied = tokenizer_files(reader.checkpoint.folder)
    config = {**token_ids(copied.pop(CONFIG_FILE, None)), **plan.config}
    config[WRITER_KEY] = {"version": __version__}
    nbytes = sum(group.nbytes for group in plan.tensors)
    nbytes += sum(file.stat().st_size for file in copied.values())
    if "model_file" in plan.config:
        copied[MODEL_FILE.name] = MODEL_FILE

    def write(folder: Path, on_bytes: OnBytes) -> None:
        write_json(folder / CONFIG_FILE, config)
        copy_files(copied, folder)
        write_shards(folder, plan.tensors, on_bytes, metadata=plan.metadata)
        if plan.scales:
            exact = [PlannedTensors.of(*item) for item in plan.scales.items()]
            write_safetensors(folder / SCALES_FILE, exact)

    return _Writer(nbytes, write)


def _gguf_writer(
    reader: ParameterReader,
    name: str,
    kind: str | None,
    forms: FloatForms,
    max_part_bytes: int | None,
) -> _Writer:
    plan = plan_gguf(reader, kind, forms, name)
    nbytes = sum(tensor.nbytes for tensor in plan.tensors)

    def write(folder: Path, on_bytes: OnBytes) -> None:
        stem = f"{name}-{plan.file_type}"
        write_parts(folder, stem, plan.metadata, plan.tensors, max_part_bytes, on_bytes)

    scale_dtype = mx.float32 if plan.file_type == "I2_S" else mx.float16
    return _Writer(nbytes, write, compare_tokenizers, scale_dtype, plan.file_type)


def _filled(card: ModelCard, to: Target, report: Report, written: ParameterReader) -> ModelCard:
    return replace(
        card,
        format=to,
        verification={**card.verification, **report.figures()},
        openings=report.openings,
        is_ternary=written.holds_ternary,
        tags=(*card.tags, *written.tags),
    )
