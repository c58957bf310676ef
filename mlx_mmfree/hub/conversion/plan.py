"""What a conversion to a checkpoint folder writes."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...files.safetensors_writer import PlannedTensors, TensorSpec
from ..checkpoint.parameter_reader import ParameterReader


@dataclass
class FolderPlan:
    """What a conversion writes.

    Attributes:
        config: `config.json`, without the ids of special tokens.
        tensors: The tensors.
        scales: Exact scales by their names on disk; they arrive as the tensors are made.
        model_file: Name of the model's Python file for mlx-lm; `None` where it needs none.
    """

    config: dict[str, Any]
    tensors: list[PlannedTensors]
    scales: dict[str, mx.array] = field(default_factory=dict)
    model_file: str | None = None


@dataclass(frozen=True)
class FloatForms:
    """What becomes of weights that are stored as floats.

    Attributes:
        dtype: Their dtype; `None` keeps each.
        embed_bits: Bits of the embedding in MLX's affine form; `None` leaves it a float matrix.
        head_bits: The same for the output head.
        ternarize_groups: Ternarise the linears of the blocks, with a scale for each 128 inputs.
        keep_masters: Leave master weights of ternary linears as they are, in transformers' form.
    """

    dtype: mx.Dtype | None = None
    embed_bits: int | None = None
    head_bits: int | None = None
    ternarize_groups: bool = False
    keep_masters: bool = False


def float_tensor(
    reader: ParameterReader, name: str, dtype: mx.Dtype | None, disk_name: str | None = None
) -> PlannedTensors:
    """A parameter as it is, floats in another dtype if one is given."""
    stored = reader.dtype(name)
    kept = stored if dtype is None or not mx.issubdtype(stored, mx.floating) else dtype
    spec = TensorSpec(disk_name or reader.names.to_disk(name), kept, reader.shapes[name])
    return PlannedTensors((spec,), lambda: (reader.read(name).astype(kept),))


def written_out(reader: ParameterReader, path: str, dtype: mx.Dtype | None) -> PlannedTensors:
    """The float matrix of a module that is stored in few bits."""
    kept = dtype or reader.matrix_dtype(path)
    name = reader.names.to_disk(f"{path}.weight")
    spec = TensorSpec(name, kept, reader.matrix_shape(path))
    return PlannedTensors((spec,), lambda: (reader.read_matrix(path).astype(kept),))
