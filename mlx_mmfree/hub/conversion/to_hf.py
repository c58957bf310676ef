"""Plans a folder in transformers' form: BitNet's packing, or the float master weights."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...files.safetensors_writer import PlannedTensors, TensorSpec
from ...models import architecture_of
from ..checkpoint.forms import bitnet_format
from ..checkpoint.parameter_reader import ParameterReader
from ..names import WeightNames, weight_names
from .plan import FloatForms, FolderPlan, float_tensor, laid_out, written_out


def plan_hf(reader: ParameterReader, forms: FloatForms) -> FolderPlan:
    """Plans a folder in transformers' form.

    Ternary linears are packed as `uint8` with a scale that multiplies. The scale stays float32, since
    any other dtype would round it. With `keep_masters` they are float master weights for training.

    Args:
        reader: The source.
        forms: What becomes of float weights.

    Raises:
        UnsupportedModelError: The form does not fit the model.
    """
    _check(reader, forms)
    hub_config, names = _in_terms_of_transformers(reader)
    config: dict[str, Any] = hub_config.to_hub()
    config["torch_dtype"] = str(forms.dtype or reader.activation_dtype).removeprefix("mlx.core.")
    if reader.ternary and not forms.keep_masters:
        config["quantization_config"]["quantization_mode"] = "offline"
    plan = FolderPlan(config, [])
    done: set[str] = set()
    for path in reader.ternary:
        if forms.keep_masters:
            plan.tensors += _masters(reader, path)
        else:
            plan.tensors.append(_packed(reader, path))
        done |= {f"{path}.weight", f"{path}.scale"}
    for path in (*reader.quantized, *reader.packed_dense):
        plan.tensors.append(written_out(reader, path, forms.dtype))
        stored = ("weight", "scales", "biases", "scale", "input_scale")
        done |= {f"{path}.{key}" for key in stored}
    # a tied ternary head is made of the embedding
    kept = {"embed.weight"} if any(map(reader.is_tied, reader.ternary)) else set()
    plan.tensors += [
        float_tensor(reader, name, None if name in kept else forms.dtype, names.to_disk(name))
        for name in reader.shapes
        if name not in done
    ]
    return plan


def _in_terms_of_transformers(reader: ParameterReader) -> tuple[Any, WeightNames]:
    """The configuration and the names on disk with which transformers runs the model."""
    config = reader.model.config
    written = architecture_of(config).as_in_transformers(config)
    return written, weight_names(written)


def _check(reader: ParameterReader, forms: FloatForms) -> None:
    for name in ("embed_bits", "head_bits"):
        if getattr(forms, name) is not None:
            raise UnsupportedModelError(
                f"[convert] '{name}' must be left out for transformers, which has no such form, but "
                f"got {getattr(forms, name)}. Leave it out, or write MLX's form."
            )
    if forms.ternarize_groups:
        raise UnsupportedModelError(
            "[convert] 'ternarize' must be 'tensor' for transformers, which has one scale for each "
            "matrix, but got 'group'. Use 'tensor', or write MLX's form."
        )
    if reader.ternary:
        _check_ternary(reader, forms)


def _check_ternary(reader: ParameterReader, forms: FloatForms) -> None:
    """Refuses ternary linears that transformers' form cannot hold."""
    if forms.keep_masters:
        packed = [path for path in reader.ternary if not reader.has_masters(path)]
        if packed:
            raise UnsupportedModelError(
                f"[convert] 'keep_masters' must be left out for '{reader.checkpoint.folder}', which "
                "holds packed weights without their float masters. Convert the checkpoint that it was "
                "packed from."
            )
        return
    architecture = architecture_of(reader.model.config)
    if bitnet_format.QUANT_METHOD not in architecture.packed_forms:
        raise UnsupportedModelError(
            f"[convert] 'keep_masters' must be given for 'model_type' {architecture.name!r}, which has "
            "no packed weights in transformers' form. Give it, or write MLX's form."
        )
    if any("bias" in matrix.layer for matrix in reader.ternary.values()):
        raise UnsupportedModelError(
            "[convert] ternary linears must have no bias in transformers' form, which would multiply "
            "it by the scale, but have one. Give 'keep_masters', which keeps it."
        )
    for path, module in reader.ternary.items():
        if module.output_dims % bitnet_format.CODES_PER_BYTE:
            raise UnsupportedModelError(
                f"[convert] the outputs of {reader.names.to_disk(path)!r} must be a multiple of "
                f"{bitnet_format.CODES_PER_BYTE} in transformers' form but are {module.output_dims}. "
                "Write MLX's form."
            )


def _packed(reader: ParameterReader, path: str) -> PlannedTensors:
    name, module = reader.names.to_disk(path), reader.ternary[path]
    shape = bitnet_format.packed_shape(module.output_dims, module.input_dims)

    def make() -> Sequence[mx.array]:
        weight, scale = reader.read_ternary(path)
        return bitnet_format.pack(weight, module.input_dims), scale

    specs = (
        TensorSpec(f"{name}.weight", mx.uint8, shape),
        TensorSpec(f"{name}.weight_scale", mx.float32, (1,)),
    )
    return PlannedTensors(specs, make)


def _masters(reader: ParameterReader, path: str) -> list[PlannedTensors]:
    """The plan of a master weight in its own dtype. Another dtype would change some trits."""
    if reader.is_tied(path):
        return []
    module, name = reader.ternary[path], f"{path}.weight"
    shape = (module.output_dims, module.input_dims)
    return [laid_out(reader, name, reader.dtype(name), shape, lambda: reader.read(name))]
