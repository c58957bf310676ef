"""Plans a folder in MLX's own form, which mlx-lm loads without this library.

Ternary linears are affine 2-bit matrices with the `scales` s and the `biases` -s. mlx-lm knows Llama and
Qwen3. Other architectures, and sizes that it would refuse, get a Python file of the model. If ternary
linears have five trits a byte, another file unpacks them to that form.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...files.safetensors_writer import PlannedTensors, TensorSpec
from ...layers import PackedLinear
from ...layers.matrix import Matrix
from ...models import architecture_of
from ...ops import pack_ternary
from ..checkpoint.forms import affine_format, five_trits
from ..checkpoint.forms.packed_format import describe_packing
from ..checkpoint.parameter_reader import ParameterReader
from .plan import FloatForms, FolderPlan, float_tensor, written_out
from .ternarize import GROUP_SIZE, ternarize_groups

MODEL_FILES = Path(__file__).parent / "mlx_model_file"

_UNPACKING_FILE, _USUAL_FILE = "five_trits.py", "ternary_transformer.py"

_EMBEDDING_GROUPS = (64, 32)

Quantize = Callable[[mx.array], tuple[mx.array, mx.array, mx.array]]


def plan_mlx(
    reader: ParameterReader, forms: FloatForms, *, has_five_trits: bool = False
) -> FolderPlan:
    """Plans a folder in MLX's form.

    Args:
        reader: The source.
        forms: What becomes of float weights.
        has_five_trits: Store ternary linears with five trits a byte.

    Raises:
        UnsupportedModelError: The form does not fit the model.
    """
    if has_five_trits and not reader.ternary:
        raise UnsupportedModelError(
            "[convert] 'trits_per_byte' must be 4 for this model but got 5: it has no ternary linears "
            "with one scale each. Leave it out."
        )
    quantized = {**ternary_forms(reader), **quantized_forms(reader, forms)}
    config: dict[str, Any] = reader.model.config.to_hub()
    plan = FolderPlan(config, [], model_files=_model_files(reader, has_five_trits))
    described: dict[str, dict[str, Any]] = {}
    if reader.ternary:
        config["quantization_config"] = describe_packing(
            config.get("quantization_config"), has_five_trits=has_five_trits
        )
    if plan.model_files:
        config["model_file"] = plan.model_files[0]
    done: set[str] = set()
    for path, module in reader.ternary.items():
        name = reader.names.to_disk(path)
        group_size = affine_format.group_size_of(module.input_dims)
        described[name] = affine_format.form(group_size, affine_format.TERNARY_BITS)
        plan.tensors.append(
            _five_trits_tensors(reader, path)
            if has_five_trits
            else _ternary_tensors(reader, path, group_size, forms.dtype, plan.scales)
        )
        done |= {f"{path}.weight", f"{path}.scale"}
    for path, (group_size, bits, quantize) in quantized.items():
        name = reader.names.to_disk(path)
        described[name] = affine_format.form(group_size, bits)
        plan.tensors.append(_quantized_tensors(reader, path, group_size, bits, quantize, forms))
        done |= {f"{path}.{key}" for key in ("weight", "scale", "input_scale")}
    for path in set(reader.packed_dense) - set(quantized):
        plan.tensors.append(written_out(reader, path, forms.dtype))
        done |= {f"{path}.{key}" for key in ("weight", "scale", "input_scale")}
    for path, kept in reader.quantized.items():
        described[reader.names.to_disk(path)] = affine_format.form(kept.group_size, kept.bits)
    plan.tensors += [
        float_tensor(reader, name, forms.dtype) for name in reader.shapes if name not in done
    ]
    if described:
        default = next(
            (f for f in described.values() if f["bits"] == affine_format.TERNARY_BITS), None
        )
        config["quantization"] = {
            **(default or affine_format.form(GROUP_SIZE, affine_format.TERNARY_BITS)),
            **described,
        }
    return plan


def quantized_forms(
    reader: ParameterReader, forms: FloatForms
) -> dict[str, tuple[int, int, Quantize]]:
    """The float modules to quantise, by path: group size, bits, and the function that quantises.

    Raises:
        UnsupportedModelError: There is no such module, or no group size divides its inputs.
    """
    found: dict[str, tuple[int, int, Quantize]] = {}
    for place, bits in (("embed", forms.embed_bits), ("head", forms.head_bits)):
        if bits is None:
            continue
        matrix = reader.matrices.get(place)
        if matrix is None or not matrix.is_plain:
            raise UnsupportedModelError(
                f"[convert] '{place}_bits' must be left out for this model but got {bits}: "
                + _why_not(place, matrix)
            )
        dims = matrix.input_dims
        group_size = next((size for size in _EMBEDDING_GROUPS if dims % size == 0), None)
        if group_size is None:
            raise UnsupportedModelError(
                f"[convert] '{place}_bits' must be left out for this model but got {bits}: no group "
                f"of {_EMBEDDING_GROUPS[-1]} divides its {dims} dims. Leave it out."
            )
        found[place] = (group_size, bits, partial(mx.quantize, group_size=group_size, bits=bits))
    if forms.ternarize_groups:
        for path, matrix in reader.matrices.items():
            in_layer = reader.names.in_layer(reader.names.to_disk(path))
            if not matrix.is_plain or matrix.is_embedding or in_layer is None:
                continue
            if matrix.input_dims % GROUP_SIZE:
                raise UnsupportedModelError(
                    f"[convert] 'ternarize' must be 'tensor' for this model but got 'group': "
                    f"{GROUP_SIZE} does not divide the {matrix.input_dims} inputs of "
                    f"{reader.names.to_disk(path)}. Use 'tensor'."
                )
            found[path] = (GROUP_SIZE, affine_format.TERNARY_BITS, ternarize_groups)
    return found


def ternary_forms(reader: ParameterReader) -> dict[str, tuple[int, int, Quantize]]:
    """The same for dense linears whose values are ternary and fit the affine form without loss.

    Linears that are in that form already are left out.
    """
    found: dict[str, tuple[int, int, Quantize]] = {}
    for path, packed in reader.ternary_values.items():
        if path in reader.quantized:
            continue
        columns = packed.get("input_scale")
        for group_size in reversed(affine_format.GROUP_SIZES):
            is_whole = packed.input_dims % group_size == 0
            if is_whole and (columns is None or _has_equal_groups(columns, group_size)):
                values = partial(_affine_values, packed=packed, group_size=group_size)
                found[path] = (group_size, affine_format.TERNARY_BITS, values)
                break
    return found


def _has_equal_groups(scales: mx.array, group_size: int) -> bool:
    groups = scales.reshape(-1, group_size)
    return bool(mx.all(groups == groups[:, :1]).item())


def _affine_values(
    weight: mx.array, packed: PackedLinear, group_size: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The codes, scales and biases of a matrix of ternary values."""
    groups = mx.ones((weight.shape[0], packed.input_dims // group_size))
    scales = groups * packed.scale[:, None]
    if "input_scale" in packed:
        scales = scales * packed.input_scale[::group_size]
    scales = scales.astype(weight.dtype)
    return pack_ternary(mx.sign(weight)), scales, -scales


def _why_not(place: str, matrix: Matrix | None) -> str:
    if matrix is not None and matrix.is_ternary:
        return "its head is ternary. Leave it out."
    if matrix is None and place == "embed":
        return "it has no embedding. Leave it out."
    if matrix is None:
        return "its head is the embedding. Use 'embed_bits'."
    return "it is stored in few bits already. Leave it out."


def _model_files(reader: ParameterReader, has_five_trits: bool) -> tuple[str, ...]:
    """The names of the Python files that mlx-lm needs for the model, of which it runs the first."""
    config = reader.model.config
    own = architecture_of(config).mlx_lm(config, reader.ternary_dims)
    if has_five_trits and own is not None:
        return _UNPACKING_FILE, own or _USUAL_FILE
    return (own,) if own else ()


def _ternary_tensors(
    reader: ParameterReader,
    path: str,
    group_size: int,
    dtype: mx.Dtype | None,
    exact: dict[str, mx.array],
) -> PlannedTensors:
    name, dtype = reader.names.to_disk(path), dtype or reader.activation_dtype
    rows, words = reader.shapes[f"{path}.weight"]
    groups = (rows, words * 16 // group_size)

    def make() -> Sequence[mx.array]:
        weight, scale = reader.read_ternary(path)
        exact[f"{name}.weight_scale"] = scale
        scales = mx.broadcast_to(scale.astype(dtype), groups)
        return weight, scales, -scales

    specs = (
        TensorSpec(f"{name}.weight", mx.uint32, (rows, words)),
        TensorSpec(f"{name}.scales", dtype, groups),
        TensorSpec(f"{name}.biases", dtype, groups),
    )
    return PlannedTensors(specs, make)


def _five_trits_tensors(reader: ParameterReader, path: str) -> PlannedTensors:
    name, module = reader.names.to_disk(path), reader.ternary[path]
    shape = five_trits.packed_shape(module.output_dims, module.input_dims)

    def make() -> Sequence[mx.array]:
        weight, scale = reader.read_ternary(path)
        return five_trits.pack(weight, module.input_dims), scale

    specs = (
        TensorSpec(f"{name}.weight", mx.uint8, shape),
        TensorSpec(f"{name}.weight_scale", mx.float32, (1,)),
    )
    return PlannedTensors(specs, make)


def _quantized_tensors(
    reader: ParameterReader,
    path: str,
    group_size: int,
    bits: int,
    quantize: Quantize,
    forms: FloatForms,
) -> PlannedTensors:
    name = reader.names.to_disk(path)
    dtype = forms.dtype or reader.matrix_dtype(path)
    rows, dims = reader.matrix_shape(path)
    groups = (rows, dims // group_size)
    specs = (
        TensorSpec(f"{name}.weight", mx.uint32, (rows, dims * bits // 32)),
        TensorSpec(f"{name}.scales", dtype, groups),
        TensorSpec(f"{name}.biases", dtype, groups),
    )
    return PlannedTensors(specs, lambda: quantize(reader.read_matrix(path).astype(dtype)))
