"""Plans of conversions: what is written to a checkpoint folder, and what becomes of floats."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...files.safetensors_writer import PlannedTensors, TensorSpec
from ...ops.float_dtypes import FLOATS
from ..checkpoint.parameter_reader import ParameterReader


@dataclass
class FolderPlan:
    """What a conversion writes to a checkpoint folder.

    Attributes:
        config: The content of `config.json`, without the ids of special tokens.
        tensors: The tensors.
        scales: The exact scales by their names on disk. It is filled while the tensors are made.
        model_files: The names of the model's Python files for mlx-lm, which runs the first; empty if it
            needs none.
    """

    config: dict[str, Any]
    tensors: list[PlannedTensors]
    scales: dict[str, mx.array] = field(default_factory=dict)
    model_files: tuple[str, ...] = ()


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
    if stored not in FLOATS:
        spec = TensorSpec(disk_name or reader.names.to_disk(name), kept, reader.shapes[name])
        return PlannedTensors((spec,), lambda: (reader.read(name),))
    return laid_out(reader, name, kept, reader.shapes[name], lambda: reader.read(name), disk_name)


def laid_out(
    reader: ParameterReader,
    name: str,
    dtype: mx.Dtype,
    shape: tuple[int, ...],
    read: Callable[[], mx.array],
    disk_name: str | None = None,
) -> PlannedTensors:
    """The plan of a float array, read as it lies in memory, in the layout of the disk."""
    layout = reader.layouts.get(name)
    write = layout.write if layout else mx.array
    on_disk = layout.shape if layout else shape
    spec = TensorSpec(disk_name or reader.names.to_disk(name), dtype, on_disk)
    return PlannedTensors((spec,), lambda: (write(read()).astype(dtype),))


def written_out(reader: ParameterReader, path: str, dtype: mx.Dtype | None) -> PlannedTensors:
    """The plan of the float matrix of a module that is stored in few bits."""
    kept = dtype or reader.matrix_dtype(path)
    shape = reader.matrix_shape(path)
    return laid_out(reader, f"{path}.weight", kept, shape, lambda: reader.read_matrix(path))
