"""Plans checkpoint folders: MLX's own format, which mlx-lm loads, and transformers'.

In MLX's format ternary linears are affine 2-bit matrices with the `scales` s and the `biases` -s. mlx-lm
knows Llama and Qwen3. Other architectures, and sizes that it would refuse, get a Python file of the
model. If ternary linears have five trits a byte, another file unpacks them to that form. In
transformers' format they have BitNet's packing, or are the float master weights.

BitNet-style models can be made of dense ones by absmean ternarisation (Ma et al., arXiv 2402.17764). The
rounding loses most of each weight. Without fine-tuning, the model is much worse or useless.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...files.tensors import HUB_METADATA, METADATA, PlannedTensors, TensorSpec
from ...layers.matrix import Matrix, StoredLayout, cast_weight, check_range
from ...layers.ternary.values import TERNARY_BITS, scales_of_blocks
from ...models import architecture_of, architectures, find, find_described
from ...models.parts.architecture import WeightNames, weight_names
from ...models.parts.ternary_linears import TernaryLinears
from ...ops import pack_ternary
from ...ops.dense_matmul import GROUP_SIZES
from ...ops.device import FLOATS
from ..checkpoint import weight_format
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.parameter_reader import ParameterReader


@dataclass
class FolderPlan:
    """The plan of a checkpoint folder.

    Attributes:
        config: The content of `config.json`, without the ids of special tokens.
        tensors: The tensors.
        scales: The exact scales by their names on disk. It is filled while the tensors are made.
        metadata: The metadata of the files, which name the layout of the arrays.
    """

    config: dict[str, Any]
    tensors: list[PlannedTensors]
    scales: dict[str, mx.array] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: METADATA)


@dataclass(frozen=True)
class GivenCodes:
    """The codes that take the place of a dense matrix.

    Attributes:
        group_size: Inputs that share a scale.
        bits: Bits of a code.
        dtype: The dtype of scales and biases.
        make: Gives codes, scales and biases.
    """

    group_size: int
    bits: int
    dtype: mx.Dtype
    make: Callable[[], Sequence[mx.array]]


@dataclass(frozen=True)
class FloatFormats:
    """The format that weights take that are stored as floats.

    Attributes:
        dtype: The dtype of floats; `None` keeps each tensor's own.
        embed_bits: The bits of the embedding in MLX's affine format; `None` leaves it a float matrix.
        head_bits: The bits of the output head; `None` leaves it as it is.
        ternarize_groups: Ternarise the linears of the blocks, with a scale for each 128 inputs.
        keep_masters: Write ternary linears as float master weights, in transformers' format.
        unrotate: Write rotated matrices as they are without their rotation, as floats or, in MLX's
            format, with codes of so many bits; `None` keeps the rotation where the format has it.
        given_codes: Codes in the place of dense matrices, by their paths, in MLX's format.
    """

    dtype: mx.Dtype | None = None
    embed_bits: int | None = None
    head_bits: int | None = None
    ternarize_groups: bool = False
    keep_masters: bool = False
    unrotate: Literal["dense"] | int | None = None
    given_codes: Mapping[str, GivenCodes] = field(default_factory=dict)


def float_tensor(
    reader: ParameterReader,
    name: str,
    dtype: mx.Dtype | None,
    disk_name: str | None = None,
    layouts: Mapping[str, StoredLayout] | None = None,
) -> PlannedTensors:
    """The plan of a parameter that is written as it is, or as floats of another dtype.

    It lies as `layouts` have it. Default: as on the Hub.
    """
    stored = reader.dtype(name)
    is_free = name not in reader.in_float32 and mx.issubdtype(stored, mx.floating)
    is_free &= not (stored == mx.float32 and name in reader.rates)
    written = dtype if dtype is not None and is_free else stored
    target = reader.layouts if layouts is None else layouts
    own, other = (each.get(name) for each in (reader.own_layouts, target))
    if dtype is None and (own and own.changes) != (other and other.changes):
        written = mx.float32
    if stored not in FLOATS:
        spec = TensorSpec(disk_name or reader.names.to_disk(name), written, reader.shapes[name])
        return PlannedTensors((spec,), lambda: (reader.read(name),))
    shape = reader.shapes[name]
    return laid_out(reader, name, written, shape, lambda: reader.read(name), disk_name, layouts)


def laid_out(
    reader: ParameterReader,
    name: str,
    dtype: mx.Dtype,
    shape: tuple[int, ...],
    read: Callable[[], mx.array],
    disk_name: str | None = None,
    layouts: Mapping[str, StoredLayout] | None = None,
) -> PlannedTensors:
    """The plan of a float array, read as it lies in memory, in the layout of the disk."""
    layout = (reader.layouts if layouts is None else layouts).get(name)
    write = layout.write if layout else mx.array
    on_disk = layout.shape if layout else shape
    spec = TensorSpec(disk_name or reader.names.to_disk(name), dtype, on_disk)
    return PlannedTensors((spec,), lambda: (cast_weight(write(read()), dtype, spec.name),))


def written_out(reader: ParameterReader, path: str, dtype: mx.Dtype | None) -> PlannedTensors:
    """The plan of the float matrix of a module that is stored in few bits."""
    written = dtype or reader.matrix_dtype(path)
    shape = reader.matrix_shape(path)
    return laid_out(reader, f"{path}.weight", written, shape, lambda: reader.read_matrix(path))


GROUP_SIZE = 128


def check_dense(checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint that is not a dense model of an architecture with a ternary format.

    Raises:
        UnsupportedModelError: The model has another architecture, or is quantised already.
    """
    config = checkpoint.config
    architecture = find_described(config)
    if not architecture.can_be_ternary:
        known = sorted(name for name, each in architectures().items() if each.is_ternarizable)
        raise UnsupportedModelError(
            f"[convert] 'ternarize' must be left out for 'model_type' {architecture.name!r:.80} but "
            f"was given. It is for {', '.join(known)} and image models."
        )
    is_described = any(config.get(key) for key in ("quantization", "quantization_config"))
    is_packed = any(
        entry.dtype in weight_format.PACKED_DTYPES for entry in checkpoint.tensors.values()
    )
    if is_described or is_packed or "BitnetForCausalLM" in config.get("architectures", ()):
        raise UnsupportedModelError(
            f"[convert] 'ternarize' must be left out for '{checkpoint.folder}', which is quantised "
            "already, but was given. Convert the float model that it was made from."
        )


def ternarized(checkpoint: Checkpoint) -> Checkpoint:
    """A dense checkpoint as the master weights of a BitNet model, with one scale for each matrix.

    Raises:
        UnsupportedModelError: As for `check_dense`.
    """
    check_dense(checkpoint)
    described = TernaryLinears().to_hub()
    return replace(checkpoint, config={**checkpoint.config, "quantization_config": described})


def ternarize_groups(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    r"""Absmean ternarisation of each group of 128 neighbouring inputs, in MLX's affine format.

    .. math::
        s = \max(\operatorname{mean}(|W|),\ 10^{-5}), \qquad
        t = \operatorname{clip}(\operatorname{round}(W / s),\ -1,\ 1)

    The scale is computed in float32 and rounded to the dtype of the weight. Ties are rounded to even.
    The weight becomes :math:`t s`.

    Args:
        weight: Floats of shape `(N, D)`, D a multiple of 128.

    Returns:
        The packed codes, `uint32` `(N, D / 16)`, and the scales `s` and biases `-s` in the dtype of the
        weight, `(N, D / 128)`.
    """
    groups = weight.astype(mx.float32).reshape(weight.shape[0], -1, GROUP_SIZE)
    scales = mx.maximum(mx.mean(mx.abs(groups), axis=-1), 1e-5).astype(weight.dtype)
    trits = mx.clip(mx.round(groups / scales.astype(mx.float32)[..., None]), -1, 1)
    return pack_ternary(trits.reshape(weight.shape)), scales, -scales


MODEL_FILE = Path(__file__).parent / "mlx_model_file" / "mmfree_model.py"
"""With what mlx-lm runs the models that it does not know."""

_EMBEDDING_GROUPS = (64, 32)
UNROTATED_GROUP = 64
"""Inputs that share a scale in a matrix whose rotation was undone."""

Quantize = Callable[[mx.array], tuple[mx.array, mx.array, mx.array]]


def plan_mlx(
    reader: ParameterReader, formats: FloatFormats, *, trits_per_byte: int = 4
) -> FolderPlan:
    """Plans a folder in MLX's format.

    Args:
        reader: The source.
        formats: What becomes of float weights.
        trits_per_byte: How many weights of ternary linears share a byte.

    Raises:
        UnsupportedModelError: The format does not fit the model.
    """
    if trits_per_byte != 4 and not reader.ternary:
        raise UnsupportedModelError(
            f"[convert] 'trits_per_byte' must be 4 for this model but got {trits_per_byte}: it has no "
            "ternary linears with one scale each. Leave it out."
        )
    ternary = _written_format("mlx-lm", trits_per_byte)
    quantized = {**ternary_formats(reader), **quantized_formats(reader, formats)}
    architecture = architecture_of(reader.model.config)
    config: dict[str, Any] = reader.model.config.to_hub()
    if architecture.name_in_mlx_lm:
        config["model_type"] = architecture.name_in_mlx_lm
    plan = FolderPlan(config, [])
    codes: dict[str, tuple[int, int]] = {}
    if reader.ternary:
        config["quantization_config"] = ternary.describe_written(config.get("quantization_config"))
    needed = architecture.mlx_lm(reader.model.config, reader.ternary_dims)
    # it also unpacks five trits a byte, if it is known at all
    if needed or (trits_per_byte != 4 and needed is not None):
        config["model_file"] = MODEL_FILE.name
    done: set[str] = set()
    for path in reader.ternary:
        written, tensors = _ternary_tensors(reader, path, ternary, formats.dtype, plan.scales)
        if written.codes is not None:
            codes[reader.names.to_disk(path)] = written.codes
        plan.tensors.append(tensors)
        done |= {f"{path}.weight", f"{path}.scale"}
    for path, (group_size, bits, quantize) in quantized.items():
        codes[reader.names.to_disk(path)] = group_size, bits
        plan.tensors.append(_quantized_tensors(reader, path, group_size, bits, quantize, formats))
        done |= reader.parts(path)
    for path, given in formats.given_codes.items():
        codes[name := reader.names.to_disk(path)] = given.group_size, given.bits
        sizes = (*reader.matrix_shape(path), given.group_size, given.bits)
        specs = weight_format.code_format()[1].specs(name, *sizes, given.dtype)
        plan.tensors.append(PlannedTensors(specs, given.make))
        done |= reader.parts(path)
    rotated = {} if formats.unrotate else rotated_layers(reader)
    for path in rotated:
        # codes, scales and signs belong together, whatever dtype other floats get
        plan.tensors += [float_tensor(reader, name, None) for name in sorted(reader.parts(path))]
        done |= reader.parts(path)
    for path in set(reader.packed_dense) - set(quantized) - set(rotated):
        plan.tensors.append(written_out(reader, path, formats.dtype))
        done |= reader.parts(path)
    for path, codec in reader.quantized.items():
        codes[reader.names.to_disk(path)] = codec.group_size, codec.bits
    layouts = reader.own_layouts
    if rotated:
        on_disk = {reader.names.to_disk(path): layer for path, layer in rotated.items()}
        config |= weight_format.rotated_format().for_mlx_lm(config, on_disk, codes)
        if (in_mlx_lm := find(config["model_type"]).layouts) is not None:
            layouts = {**layouts, **in_mlx_lm(reader.model, {}, "mlx")}
    else:
        config |= weight_format.code_format()[1].describe(codes)
        if architecture.layouts is not None and reader.lies_as_on_hub:
            plan.metadata = HUB_METADATA
    plan.tensors += [
        float_tensor(reader, name, formats.dtype, layouts=layouts)
        for name in reader.shapes
        if name not in done
    ]
    plan.tensors = [_with_axes(reader, each) for each in plan.tensors]
    return plan


def _with_axes(reader: ParameterReader, planned: PlannedTensors) -> PlannedTensors:
    """The same codes and scales, with the axis for experts that the floats of a matrix have on disk."""
    leading = {
        reader.names.to_disk(path): layout.shape[:-1]
        for name, layout in reader.layouts.items()
        if (path := name.removesuffix(".weight")) in reader.matrices and len(layout.shape) > 2
    }
    axes = [leading.get(spec.name.rpartition(".")[0], ()) for spec in planned.specs]
    shapes = [
        (*own, spec.shape[-1]) if own and math.prod(own) == spec.shape[0] else spec.shape
        for own, spec in zip(axes, planned.specs, strict=True)
    ]
    if not any(axes):
        return planned

    def make() -> Sequence[mx.array]:
        made = zip(planned.make(), shapes, strict=True)
        return [array.reshape(shape) for array, shape in made]

    specs = (replace(s, shape=shape) for s, shape in zip(planned.specs, shapes, strict=True))
    return PlannedTensors(tuple(specs), make)


def rotated_layers(reader: ParameterReader) -> dict[str, Any]:
    """The layers of a model whose matrices are rotated, by their paths."""
    packed = reader.packed_dense.items()
    return {path: matrix.layer for path, matrix in packed if matrix.is_rotated}


def quantized_formats(
    reader: ParameterReader, formats: FloatFormats
) -> dict[str, tuple[int, int, Quantize]]:
    """The float modules to quantise, by path: group size, bits, and the function that quantises.

    Raises:
        UnsupportedModelError: There is no such module, or no group size divides its inputs.
    """
    found: dict[str, tuple[int, int, Quantize]] = {}
    for module, bits in (("embed", formats.embed_bits), ("head", formats.head_bits)):
        if bits is None:
            continue
        matrix = reader.matrices.get(module)
        if matrix is None or not matrix.is_plain:
            raise UnsupportedModelError(
                f"[convert] '{module}_bits' must be left out for this model but got {bits}: "
                + _why_not(module, matrix)
            )
        dims = matrix.input_dims
        group_size = next((size for size in _EMBEDDING_GROUPS if dims % size == 0), None)
        if group_size is None:
            raise UnsupportedModelError(
                f"[convert] '{module}_bits' must be left out for this model but got {bits}: no group "
                f"of {_EMBEDDING_GROUPS[-1]} divides its {dims} dims. Leave it out."
            )
        found[module] = (group_size, bits, partial(mx.quantize, group_size=group_size, bits=bits))
    if isinstance(formats.unrotate, int):
        for path, layer in rotated_layers(reader).items():
            quantize = partial(mx.quantize, group_size=UNROTATED_GROUP, bits=formats.unrotate)
            if layer.input_dims % UNROTATED_GROUP == 0:
                found[path] = (UNROTATED_GROUP, formats.unrotate, quantize)
    if formats.ternarize_groups:
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
            found[path] = (GROUP_SIZE, TERNARY_BITS, ternarize_groups)
    return found


def ternary_formats(reader: ParameterReader) -> dict[str, tuple[int, int, Quantize]]:
    """The same for dense linears whose values are ternary and fit codes without loss.

    Linears that are in that form already are left out.
    """
    found: dict[str, tuple[int, int, Quantize]] = {}
    for path, packed in reader.ternary_values.items():
        if path in reader.quantized:
            continue
        for group_size in reversed(GROUP_SIZES):
            if (scales := scales_of_blocks(packed, group_size)) is not None:
                values = partial(_values_in_codes, scales=scales)
                found[path] = (group_size, TERNARY_BITS, values)
                break
    return found


def _values_in_codes(weight: mx.array, scales: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The codes, scales and biases of a matrix of ternary values."""
    scales = scales.astype(weight.dtype)
    return pack_ternary(mx.sign(weight)), scales, -scales


def _why_not(module: str, matrix: Matrix | None) -> str:
    if matrix is not None and matrix.is_ternary:
        return "its head is ternary. Leave it out."
    if matrix is None and module == "embed":
        return "it has no embedding. Leave it out."
    if matrix is None:
        return "its head is the embedding. Use 'embed_bits'."
    return "it is stored in few bits already. Leave it out."


def _written_format(program: str, trits_per_byte: int = 4) -> weight_format.WeightFormat:
    """The format in which ternary matrices are written for a program."""
    return next(
        format
        for format in weight_format.weight_formats().values()
        if format.write is not None
        and format.trits_per_byte == trits_per_byte
        and program in format.opens_in
    )


def _ternary_tensors(
    reader: ParameterReader,
    path: str,
    format: weight_format.WeightFormat,
    dtype: mx.Dtype | None,
    exact: dict[str, mx.array],
) -> tuple[weight_format.WrittenMatrix, PlannedTensors]:
    """How a ternary linear is written, and the plan. A scale that the format holds only rounded goes to
    `exact`.
    """
    name, matrix = reader.names.to_disk(path), reader.ternary[path]
    assert format.write is not None
    sizes = matrix.output_dims, matrix.input_dims
    written = format.write(name, *sizes, dtype or reader.activation_dtype)

    def make() -> Sequence[mx.array]:
        words, scale = reader.read_ternary(path)
        if written.repeats_scale:
            exact[f"{name}.weight_scale"] = scale
        made = written.make(words, scale)
        for array in made:
            if array.dtype in FLOATS:
                check_range(array, scale, f"{name}.weight_scale")
        return made

    return written, PlannedTensors(written.specs, make)


def _quantized_tensors(
    reader: ParameterReader,
    path: str,
    group_size: int,
    bits: int,
    quantize: Quantize,
    formats: FloatFormats,
) -> PlannedTensors:
    name = reader.names.to_disk(path)
    dtype = formats.dtype or reader.matrix_dtype(path)
    specs = weight_format.code_format()[1].specs(
        name, *reader.matrix_shape(path), group_size, bits, dtype
    )
    return PlannedTensors(
        specs, lambda: quantize(cast_weight(reader.read_matrix(path), dtype, f"{name}.weight"))
    )


def plan_hf(reader: ParameterReader, formats: FloatFormats) -> FolderPlan:
    """Plans a folder in transformers' format.

    Ternary linears are packed as `uint8` with a scale that multiplies. The scale stays float32, since
    any other dtype would round it. With `keep_masters` they are float master weights for training.

    Args:
        reader: The source.
        formats: What becomes of float weights.

    Raises:
        UnsupportedModelError: The format does not fit the model.
    """
    _check(reader, formats)
    hub_config, names = _in_terms_of_transformers(reader)
    config: dict[str, Any] = hub_config.to_hub()
    config["torch_dtype"] = str(formats.dtype or reader.activation_dtype).removeprefix("mlx.core.")
    format = _written_format("transformers")
    if reader.ternary and not formats.keep_masters:
        config["quantization_config"] = format.describe_written(config["quantization_config"])
    has_layouts = architecture_of(reader.model.config).layouts is not None
    plan = FolderPlan(config, [], metadata=HUB_METADATA if has_layouts else METADATA)
    done: set[str] = set()
    for path in reader.ternary:
        if formats.keep_masters:
            plan.tensors += _masters(reader, path)
        else:
            plan.tensors.append(_ternary_tensors(reader, path, format, None, plan.scales)[1])
        done |= {f"{path}.weight", f"{path}.scale"}
    for path in (*reader.quantized, *reader.packed_dense):
        plan.tensors.append(written_out(reader, path, formats.dtype))
        done |= reader.parts(path)
    # a tied ternary head is made of the embedding
    unchanged = {"embed.weight"} if any(map(reader.is_tied, reader.ternary)) else set()
    plan.tensors += [
        float_tensor(
            reader, name, None if name in unchanged else formats.dtype, names.to_disk(name)
        )
        for name in reader.shapes
        if name not in done
    ]
    plan.tensors = [_apart(each, names) for each in plan.tensors]
    return plan


def _apart(group: PlannedTensors, names: WeightNames) -> PlannedTensors:
    """The plan with a tensor for each expert, as programs have them that do not stack them."""
    spec = group.specs[0]
    if (name := names.in_stack(spec.name)) is None:
        return group
    count, *shape = spec.shape
    specs = (TensorSpec(name.format(n), spec.dtype, tuple(shape)) for n in range(count))
    return PlannedTensors(tuple(specs), lambda: list(group.make()[0]))


def _in_terms_of_transformers(reader: ParameterReader) -> tuple[Any, WeightNames]:
    """The configuration and the names on disk with which transformers runs the model."""
    config = reader.model.config
    written = architecture_of(config).as_in_transformers(config)
    return written, weight_names(written)


def _check(reader: ParameterReader, formats: FloatFormats) -> None:
    for name in ("embed_bits", "head_bits"):
        if getattr(formats, name) is not None:
            raise UnsupportedModelError(
                f"[convert] '{name}' must be left out for transformers, which has no such format, but "
                f"got {getattr(formats, name)}. Leave it out, or write MLX's format."
            )
    if isinstance(formats.unrotate, int):
        raise UnsupportedModelError(
            f"[convert] 'unrotate' must be dense for transformers but got {formats.unrotate}. Write "
            "MLX's format, which has codes."
        )
    if formats.ternarize_groups:
        raise UnsupportedModelError(
            "[convert] 'ternarize' must be 'tensor' for transformers, which has one scale for each "
            "matrix, but got 'group'. Use 'tensor', or write MLX's format."
        )
    if reader.ternary:
        _check_ternary(reader, formats)


def _check_ternary(reader: ParameterReader, formats: FloatFormats) -> None:
    """Refuses ternary linears that transformers' format cannot hold."""
    architecture = architecture_of(reader.model.config)
    format = _written_format("transformers")
    # image models are read in it, but transformers does not run them
    has_format = not architecture.variants and format.method in architecture.packed_formats
    if not all(map(reader.has_masters, reader.ternary)) and (
        formats.keep_masters or not has_format
    ):
        others = "MLX's format (--to mlx)"
        has_gguf = architecture.gguf_name(reader.model.config) is not None
        others += ", GGUF (--to gguf)" if has_gguf else ""
        others += ", or transformers' format without 'keep_masters'" if has_format else ""
        raise UnsupportedModelError(
            f"[convert] '{reader.checkpoint.folder}' must have float masters to be written for "
            f"transformers{'' if has_format else ', which has no format for its packed weights,'} but "
            f"holds packed weights alone. Possible: {others}. Or convert the masters that it was "
            "packed from, or new ones (mmfree lora --fine-tune-type full --rebuild-masters)."
        )
    if formats.keep_masters:
        return
    if not has_format:
        raise UnsupportedModelError(
            f"[convert] 'keep_masters' must be given for 'model_type' {architecture.name!r}, which has "
            "no packed weights in transformers' format. Give it, or write MLX's format."
        )
    if any("bias" in matrix.layer for matrix in reader.ternary.values()):
        raise UnsupportedModelError(
            "[convert] ternary linears must have no bias in transformers' format, which would multiply "
            "it by the scale, but have one. Give 'keep_masters', which keeps it."
        )
    for path, module in reader.ternary.items():
        if module.output_dims % format.rows:
            raise UnsupportedModelError(
                f"[convert] the outputs of {reader.names.to_disk(path)!r} must be a multiple of "
                f"{format.rows} in transformers' format but are {module.output_dims}. "
                "Write MLX's format."
            )


def _masters(reader: ParameterReader, path: str) -> list[PlannedTensors]:
    """The plan of a master weight in its own dtype. Another dtype would change some trits."""
    if reader.is_tied(path):
        return []
    module, name = reader.ternary[path], f"{path}.weight"
    shape = (module.output_dims, module.input_dims)
    return [laid_out(reader, name, reader.dtype(name), shape, lambda: reader.read(name))]
