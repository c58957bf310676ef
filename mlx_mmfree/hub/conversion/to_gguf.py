"""Plans a GGUF file for llama.cpp or bitnet.cpp."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedModelError
from ...files.gguf.writer import PlannedGGUFTensor
from ...models import architecture_of
from ...tokenizer.to_gguf import vocabulary_metadata
from ..checkpoint import gguf_rotation
from ..checkpoint.forms.packed_format import WRITER_KEY
from ..checkpoint.gguf_config import find_form
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.writer_record import record, rounding_of
from ..publish.runtimes import BITNET_CPP_ONLY
from .gguf_tensors import BLOCKS, FLOAT_NAMES, TensorPlanner
from .plan import FloatForms

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
    if (rule := gguf_rotation.refusal(config.rotation, architecture)) is not None:
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
    return sizes | gguf_rotation.scaling_metadata(config.rotation)
