"""MLX's affine format of quantised linears and embeddings, as mlx-lm writes it.

A module `X` has `X.weight`, `uint32` with codes of 1 to 8 bits, and `X.scales` and `X.biases` with one
float for each group of inputs. The weight is `code * scale + bias`. Activations stay floats.
`config.json` describes the format under `quantization`. There, the name of a module may hold another
format, `false` for none, or `true` for the usual one. Ternary Bonsai uses 2 bits with codes below 3 and
`bias = -scale`, and 1-bit Bonsai 1 bit with `bias = -scale / 2`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....files.gguf_blocks import code_scales, code_words
from ....files.tensors import TensorEntry, TensorSpec, read_tensor
from ....layers.matrix import FEW_BITS, Matrix
from ....layers.ternary.values import TERNARY_BITS
from ....ops.dense_matmul import GROUP_SIZES
from ....ops.device import FLOATS
from ....ops.ternary import CODES_PER_WORD, packed_width
from .. import weight_format
from .packed import describe_packing

METHOD = "affine"
BITS = (1, 2, 3, 4, 5, 6, 8)

_FORMAT_KEYS = {"group_size", "bits", "mode"}


def format(group_size: int, bits: int) -> dict[str, Any]:
    """The description of a format in `config.json`."""
    return {"group_size": group_size, "bits": bits, "mode": METHOD}


def group_size_of(input_dims: int) -> int:
    """The largest group that divides a row after it was padded to a multiple of 32."""
    padded = packed_width(input_dims) * CODES_PER_WORD
    return next(size for size in reversed(GROUP_SIZES) if padded % size == 0)


def specs(
    name: str, output_dims: int, input_dims: int, group_size: int, bits: int, dtype: mx.Dtype
) -> tuple[TensorSpec, ...]:
    """The tensors of a module, of which `input_dims` are whole groups."""
    groups = (output_dims, input_dims // group_size)
    return (
        TensorSpec(f"{name}.weight", mx.uint32, (output_dims, input_dims * bits // 32)),
        TensorSpec(f"{name}.scales", dtype, groups),
        TensorSpec(f"{name}.biases", dtype, groups),
    )


def check_format(described: Any) -> None:
    """Refuses modes, bits and group sizes that are not read.

    Raises:
        UnsupportedModelError: The format is not read.
    """
    formats = [described]
    if isinstance(described, Mapping):
        own = [value for key, value in described.items() if key not in _FORMAT_KEYS]
        formats += [value for value in own if not isinstance(value, bool)]
        formats[0] = {key: described[key] for key in _FORMAT_KEYS if key in described}
    for each in formats:
        if (
            not isinstance(each, Mapping)
            or set(each) - _FORMAT_KEYS
            or each.get("bits") not in BITS
            or isinstance(each["bits"], bool)
            or each.get("group_size") not in GROUP_SIZES
            or each.get("mode", METHOD) != METHOD
        ):
            raise UnsupportedModelError(
                f"[config.json] 'quantization' must be affine with {_listed(BITS)} bits and a group "
                f"size of {_listed(GROUP_SIZES)} but got {each!r:.200}. Use a checkpoint in such a "
                f"format."
            )


def _sizes_of(name: str, described: Mapping[str, Any]) -> tuple[int, int]:
    own = described.get(name)
    given = own if isinstance(own, Mapping) else described
    # some writers of JSON give whole numbers a fraction of zero
    return int(given["group_size"]), int(given["bits"])


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _open(
    unread: Mapping[str, weight_format.UnreadMatrix],
) -> dict[str, weight_format.StoredMatrix]:
    found = {}
    for path, (matrix, name, tensors, description) in unread.items():
        if not matrix.holds_floats or matrix.is_ternary or "scales" not in tensors:
            continue
        group_size, bits = _sizes_of(name, description)
        if matrix.input_dims % group_size:
            raise CheckpointError(
                f"[config.json] 'group_size' must divide the {matrix.input_dims} inputs of {name!r} but "
                f"got {group_size}. Take config.json from the original checkpoint."
            )
        scales, biases = tensors["scales"], tensors.get("biases", tensors["scales"])
        if biases.dtype != scales.dtype:
            wanted, got = (str(each.dtype).removeprefix("mlx.core.") for each in (scales, biases))
            raise CheckpointError(
                f"[load] tensor {biases.name!r} in '{biases.file}' must be {wanted}, as {scales.name!r} "
                f"is, but is {got}. Check that config.json and the weights belong together and are "
                "complete."
            )
        if matrix.is_plain:
            layer = matrix.in_codes(group_size, bits)
            found[path] = weight_format.StoredMatrix(
                layer, _of_experts(tensors, matrix.output_dims)
            )
        else:
            entries = _in_float32(matrix, name, tensors, group_size, bits)
            found[path] = weight_format.StoredMatrix(matrix.layer, entries=entries)
    return found


def _in_float32(
    matrix: Matrix, name: str, tensors: Mapping[str, TensorEntry], group_size: int, bits: int
) -> dict[str, TensorEntry]:
    """The tensors of a layer that multiplies floats alone, such as a router.

    Raises:
        CheckpointError: A tensor of the codes is missing, or has another shape or dtype.
    """
    rows, dims = matrix.output_dims, matrix.input_dims
    parts = []
    for spec in specs(name, rows, dims, group_size, bits, tensors["scales"].dtype):
        entry = tensors.get(spec.name.rpartition(".")[2])
        format = None if entry is None else (entry.dtype, entry.shape)
        if (
            entry is None
            or format != (spec.dtype, spec.shape)
            or tensors["scales"].dtype not in FLOATS
        ):
            raise CheckpointError(
                f"[load] tensor {spec.name!r:.100} must be there with shape {spec.shape}, as codes of "
                f"{bits} bits in groups of {group_size} with scales and biases in floats have, but "
                f"{'is missing' if format is None else f'has {format[1]} of {format[0]}'}. Check that "
                "config.json and the weights belong together and are complete."
            )
        parts.append(entry)
    decode = partial(_dequantized, parts, group_size, bits)
    weight = TensorEntry(
        parts[0].name, parts[0].file, mx.float32, (rows, dims), 0, 0, decode=decode
    )
    return {"weight": weight, **({"bias": tensors["bias"]} if "bias" in tensors else {})}


def _dequantized(
    parts: Sequence[TensorEntry], group_size: int, bits: int, data: np.ndarray
) -> np.ndarray:
    codes, *floats = map(read_tensor, parts)
    scales, biases = (each.astype(mx.float32) for each in floats)
    return np.asarray(mx.dequantize(codes, scales, biases, group_size, bits).view(mx.uint32))


def _of_experts(
    tensors: Mapping[str, TensorEntry], output_dims: int
) -> dict[str, weight_format.StoredTensor]:
    """How parameters are stored that have an axis for experts before their rows."""
    return {
        key: weight_format.StoredTensor((each.shape,), (each.dtype,), _in_rows)
        for key in ("weight", "scales", "biases")
        if (each := tensors.get(key)) and math.prod(each.shape[:-1]) == output_dims
        if len(each.shape) == 3 and (each.dtype == mx.uint32) == (key == "weight")
    }


def _in_rows(array: mx.array) -> mx.array:
    return array.reshape(-1, array.shape[-1])


def _describe(matrices: Mapping[str, Matrix], config: Mapping[str, Any]) -> dict[str, Any]:
    formats = {
        name: format(matrix.layer.group_size, matrix.layer.bits)
        for name, matrix in matrices.items()
        if matrix.holds_codes
    }
    if not formats:
        return {}
    usual = next(iter(formats.values()))
    others = {name: own for name, own in formats.items() if own != usual}
    return {"quantization": {**usual, **others}}


def _write(
    name: str, output_dims: int, input_dims: int, dtype: mx.Dtype
) -> weight_format.WrittenMatrix:
    """Codes with the scale s and the bias -s for each group, rounded to a dtype."""
    padded, group_size = packed_width(input_dims) * CODES_PER_WORD, group_size_of(input_dims)
    planned = specs(name, output_dims, padded, group_size, TERNARY_BITS, dtype)

    def make(words: mx.array, scale: mx.array) -> Sequence[mx.array]:
        scales = mx.broadcast_to(scale.astype(dtype), planned[1].shape)
        return words, scales, -scales

    return weight_format.WrittenMatrix(
        planned, make, repeats_scale=True, codes=(group_size, TERNARY_BITS)
    )


def _describe_codes(sizes: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Names the format of each module; the usual format is the format of the first trits or signs."""
    usual = next((own for own in sizes.values() if own[1] in FEW_BITS), (128, TERNARY_BITS))
    own = {name: format(*each) for name, each in sizes.items()}
    return {"quantization": {**format(*usual), **own}} if sizes else {}


def _open_gguf(matrix: weight_format.GGUFMatrix) -> list[TensorEntry]:
    """Codes, scales and biases without loss.

    With the scale s of a block, weights are `(code - 1) * s`, and of one bit `(2 * code - 1) * s`.
    """
    kind, (*axes, inputs) = matrix.tensor.kind, matrix.tensor.shape
    bits = kind.code_bits
    if matrix.is_ternary or not bits or not axes:
        return []
    # the rows of experts lie one after the other
    rows, module = math.prod(axes), matrix.name.removesuffix(".weight")
    parts: dict[str, tuple[mx.Dtype, int, Callable[..., np.ndarray]]] = {
        "weight": (mx.uint32, inputs * bits // 32, code_words),
        "scales": (
            mx.float16,
            inputs // kind.block,
            partial(code_scales, factor=2 if bits == 1 else 1),
        ),
        "biases": (mx.float16, inputs // kind.block, partial(code_scales, factor=-1)),
    }
    return [
        matrix.entry_of_rows(
            f"{module}.{key}", dtype, (rows, columns), partial(decode, kind, shape=(rows, inputs))
        )
        for key, (dtype, columns, decode) in parts.items()
    ]


def _describe_gguf(
    tensors: Mapping[str, weight_format.GGUFTensor], others: Sequence[str]
) -> dict[str, Any]:
    return _describe_codes(
        {name: (each.kind.block, each.kind.code_bits) for name, each in tensors.items()}
    )


FORMAT = weight_format.WeightFormat(
    name=METHOD,
    open=_open,
    section="quantization",
    check=check_format,
    describe=_describe,
    write=_write,
    describe_written=describe_packing,
    codes=weight_format.InCodes(specs, _describe_codes, _sizes_of),
    gguf=weight_format.InGGUF(_open_gguf, _describe_gguf),
    opens_in=("mlx-lm",),
)
