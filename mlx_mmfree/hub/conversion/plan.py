"""Plans of conversions: what is written to a checkpoint folder, and what becomes of floats."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...files.safetensors_writer import PlannedTensors, TensorSpec
from ..checkpoint.parameter_reader import ParameterReader


@dataclass
class FolderPlan:
    """What a conversion writes to a checkpoint folder.

    Attributes:
        config: The content of `config.json`, without the ids of special tokens.
        tensors: The tensors.
        scales: The exact scales by their names on disk. It is filled while the tensors are made.
        model_file: The name of the model's Python file for mlx-lm; `None` if mlx-lm needs none.
    """

    config: dict[str, Any]
    tensors: list[PlannedTensors]
    scales: dict[str, mx.array] = field(default_factory=dict)
    model_file: str | None = None


@dataclass(frozen=True)
class FloatForms:
    """What becomes of weights that are stored as floats.

    Attributes:
        dtype: The dtype of floats; `None` keeps that of each tensor.
        embed_bits: The bits of the embedding in MLX's affine form; `None` leaves it a float matrix.
        head_bits: The bits of the output head; `None` leaves it as it is.
        ternarize_groups: Ternarise the linears of the blocks, with a scale for each 128 inputs.
        keep_masters: Write ternary linears as float master weights, in transformers' form.
    """

    dtype: mx.Dtype | None = None
    embed_bits: int | None = None
    head_bits: int | None = None
    ternarize_groups: bool = False
    keep_masters: bool = False


def float_tensor(
    reader: ParameterReader, name: str, dtype: mx.Dtype | None, disk_name: str | None = None
) -> PlannedTensors:
    """The plan of a parameter that is written as it is, or as floats of another dtype."""
    stored = reader.dtype(name)
    kept = stored if dtype is None or not mx.issubdtype(stored, mx.floating) else dtype
    spec = TensorSpec(disk_name or reader.names.to_disk(name), kept, reader.shapes[name])
    return PlannedTensors((spec,), lambda: (reader.read(name).astype(kept),))


def written_out(reader: ParameterReader, path: str, dtype: mx.Dtype | None) -> PlannedTensors:
    """The plan of the float matrix of a module that is stored in few bits."""
    kept = dtype or reader.matrix_dtype(path)
    name = reader.names.to_disk(f"{path}.weight")
    spec = TensorSpec(name, kept, reader.matrix_shape(path))
    return PlannedTensors((spec,), lambda: (reader.read_matrix(path).astype(kept),))
