"""This library's packed format of a checkpoint on disk.

Names and `config.json` follow the architecture on the Hub, with two differences.

- Each ternary linear `X` has `X.weight`, `uint32` in the layout of `ops.ternary`, and `X.weight_scale`,
  float32 of shape `(1,)`. In that layout a word holds 16 neighbouring inputs, the first in the lowest
  bits, `code = trit + 1`, and rows are padded to a multiple of 32 inputs with code 1. The weight is
  `trit * weight_scale`. If `linear_class` is `linear`, activations stay floats. Then `weight_scale` may
  have one number for each row, and the weight is also multiplied by `X.input_scale`, float32, which has
  one number for each column.
- `config.json` has the `quantization_config` of `describe_packing`.

mlx-lm can read the folders that `convert` writes. In these, `X.scales` and `X.biases` repeat the scale
in MLX's affine format, rounded to the dtype of the model. `config.json` has `quantization` too, and the
exact scales are in a file of their own, which mlx-lm does not read. With `trits_per_byte`, there are no
such copies: the model's Python file makes them.

Dense weights whose stored values are already ternary are packed in this format without loss. TriLM
stores `trit * scale`. Training split its matrices into blocks of rows or of columns, each with a scale
of its own. The scales are read from the values, and nothing is rounded. Ternary matrices in MLX's
affine 2-bit format are found in the same way, by their codes and scales. Where each group of 128, 64 or
32 inputs has a scale of its own, as in BitCPM, floats become that affine format.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import UnsupportedModelError
from ....files.gguf_blocks import ternary_scale, ternary_words
from ....files.tensors import TensorEntry
from ....layers import PackedLinear
from ....layers.matrix import Matrix
from ....layers.ternary.values import with_fewer_bits
from ....ops.device import FLOATS
from ....ops.ternary import packed_width
from .. import weight_format

OWN = {"quant_method": "mmfree", "format_version": 1, "bits": 2}


def describe_packing(
    described: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] = OWN,
    *,
    is_dense: bool = False,
) -> dict[str, Any]:
    """The value of `quantization_config`.

    Args:
        described: The value for the checkpoint with float master weights. What it says about the
            mathematics of the linears stays.
        own: The entries that tell this format, or another with its `quant_method`.
        is_dense: Whether the linears belong to a dense model, whose activations stay floats.
    """
    stored = {"linear_class", "quantization_mode", "trits_per_byte"}
    entries = {key: value for key, value in (described or {}).items() if key not in stored}
    if is_dense:
        entries["linear_class"] = "linear"
    return {**entries, **own}


def open_packed(
    unread: Mapping[str, weight_format.UnreadMatrix],
) -> dict[str, weight_format.StoredMatrix]:
    """The matrices that are stored with a scale, by their paths."""
    found = {}
    for path, (matrix, _, tensors, _) in unread.items():
        if "weight_scale" not in tensors:
            continue
        weight, scale = tensors.get("weight"), tensors["weight_scale"]
        if matrix.is_ternary:
            # MLX's affine format repeats the scale, rounded, for each group of inputs
            found[path] = weight_format.StoredMatrix(
                matrix.packed_space(), copies=("scales", "biases")
            )
        elif matrix.is_plain and not matrix.is_embedding and weight and weight.dtype == mx.uint32:
            layer = PackedLinear(
                matrix.input_dims,
                matrix.output_dims,
                "bias" in matrix.layer,
                has_row_scales=scale.shape != (1,),
                has_column_scales="input_scale" in tensors,
            )
            own = scale.name.endswith(".weight_scale")
            has_axes = not own and math.prod(scale.shape) == matrix.output_dims
            found[path] = weight_format.StoredMatrix(
                layer, _of_rows(layer, scale.shape) if has_axes else {}
            )
    return found


def _of_rows(layer: PackedLinear, rows: tuple[int, ...]) -> dict[str, weight_format.StoredTensor]:
    """How another writer stores codes and scales of rows: with an axis for experts, in any float."""
    width = layer.weight.shape[1]
    return {
        "weight": weight_format.StoredTensor(
            ((*rows, width),), (mx.uint32,), lambda x: x.reshape(-1, width)
        ),
        "scale": weight_format.StoredTensor(
            (rows,), FLOATS, lambda x: x.astype(mx.float32).reshape(-1)
        ),
    }


def _describe(matrices: Mapping[str, Matrix], config: Mapping[str, Any]) -> dict[str, Any]:
    packed = [matrix for matrix in matrices.values() if matrix.holds_trits]
    if not packed:
        return {}
    is_dense = not any(matrix.is_ternary for matrix in packed)
    described = config.get("quantization_config")
    return {"quantization_config": describe_packing(described, is_dense=is_dense)}


def _open_gguf(matrix: weight_format.GGUFMatrix) -> list[TensorEntry]:
    """Trits and the one scale of a linear whose activations have 8 bits."""
    if not matrix.is_ternary:
        return []
    tensor = matrix.tensor
    rows, inputs = tensor.shape
    words = partial(ternary_words, tensor.kind, shape=(rows, inputs))
    return [
        matrix.entry_of_rows(matrix.name, mx.uint32, (rows, packed_width(inputs)), words),
        matrix.entry(f"{matrix.name}_scale", mx.float32, (1,), partial(_one_scale, tensor)),
    ]


def _one_scale(tensor: weight_format.GGUFTensor, data: np.ndarray) -> np.ndarray:
    scales = ternary_scale(tensor.kind, data)
    if scales.size != 1:
        raise UnsupportedModelError(
            f"[GGUF] tensor {tensor.name!r:.100} must have one scale in all its blocks but has "
            f"{scales.size}. Convert the model from its original checkpoint."
        )
    return scales.astype(np.float32)


def _describe_gguf(
    tensors: Mapping[str, weight_format.GGUFTensor], others: Sequence[str]
) -> dict[str, Any]:
    return {"quantization_config": describe_packing({"modules_to_not_convert": [*others]})}


FORMAT = weight_format.WeightFormat(
    name="mmfree",
    open=open_packed,
    own=OWN,
    is_usual=True,
    simplify=with_fewer_bits,
    describe=_describe,
    gguf=weight_format.InGGUF(_open_gguf, _describe_gguf),
)
