"""Builds the model of a checkpoint without its weights, in the forms in which they are stored.

MLX is lazy: a model takes no memory for weights that are replaced before they are evaluated. So a
configuration is compared with the file before anything of its size is allocated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...files.tensor_entry import TensorEntry, read_tensor
from ...layers import PackedLinear, packable
from ...layers.matrix import matrices, parameters, stored_layouts
from ...models import Decoder, find_described
from ...models.parts.fields import section
from ...ops.float_dtypes import FLOATS
from ..names import WeightNames
from .checkpoint import Checkpoint
from .forms import affine_format, bitnet_format, five_trits
from .forms.packed_format import check_packing, has_five_trits
from .match import EMBEDDING, StoredForm, match


@dataclass
class Skeleton:
    """A model that waits for its weights.

    Attributes:
        model: The model. Its linears are packed where those of the checkpoint are, or everywhere.
        names: Names on disk and in memory.
        entries: The tensor on disk of each stored parameter, by its name in memory.
        forms: How a parameter is stored where that differs from its form in memory, by the same names.
        training: The training forms of linears that are stored packed, by their paths.
        masters: The float matrix of each linear that is packed here but not on disk, by its path. It is
            given by its name in memory and may be the embedding that a tied head shares.
        is_packed: Whether everything that can be packed without loss is to be packed.
    """

    model: Decoder
    names: WeightNames
    entries: dict[str, TensorEntry]
    forms: dict[str, StoredForm]
    training: dict[str, nn.Module]
    masters: dict[str, str]
    is_packed: bool


def build_skeleton(checkpoint: Checkpoint, *, packed: bool) -> Skeleton:
    """Builds the model of a checkpoint and finds the tensor of each of its parameters.

    Args:
        checkpoint: The checkpoint.
        packed: Pack the ternary linears that the checkpoint stores as floats.

    Raises:
        UnsupportedModelError: The architecture or an option is not implemented.
        CheckpointError: The configuration is damaged, or the tensors do not belong to it.
    """
    architecture = find_described(checkpoint.config)
    check_packing(checkpoint.config, architecture.read_forms)
    stored = checkpoint.tensors
    tensors = {architecture.newer_name(name, stored): entry for name, entry in stored.items()}
    checkpoint = replace(checkpoint, tensors=tensors)
    model = architecture.build(architecture.config.from_hub(checkpoint.config))
    names = WeightNames(architecture.weight_names)
    training = {
        path: module
        for path, module in packable(model).items()
        if names.to_disk(f"{path}.scale") in checkpoint.tensors
    }
    _pack(model, training)
    _pack_dense(model, names, checkpoint)
    quantization = checkpoint.config.get("quantization")
    if quantization is not None:
        affine_format.quantize_modules(model, names, checkpoint.tensors, quantization)
    described = section(checkpoint.config, "quantization_config")
    forms = _laid_out(model)
    if bitnet_format.is_packed(described):
        _check_packed_everywhere(model, names, checkpoint)
        forms |= _bitnet_forms(model, described, names, checkpoint)
    elif has_five_trits(described):
        _check_packed_everywhere(model, names, checkpoint)
        forms |= _five_trits_forms(model)
    else:
        _check_described(checkpoint)
    entries = match(model, names, forms, checkpoint)
    masters = _pack_masters(model, entries) if packed else {}
    return Skeleton(model, names, entries, forms, training, masters, packed)


def _laid_out(model: Decoder) -> dict[str, StoredForm]:
    """The forms of float arrays whose axes lie in another order on disk."""
    arrays = parameters(model)
    return {
        name: StoredForm((layout.shape,), FLOATS, layout.read)
        for name, layout in stored_layouts(model).items()
        if arrays[name].dtype in FLOATS
    }


def _pack(model: Decoder, modules: Mapping[str, nn.Module]) -> None:
    packed = [(path, module.to_packed()) for path, module in modules.items()]
    model.update_modules(tree_unflatten(packed))


def _pack_masters(model: Decoder, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Packs the linears in their training form, and gives the names of their float matrices."""
    modules = packable(model)
    _pack(model, modules)
    own = {path: f"{path}.weight" for path in modules}
    return {path: name if name in entries else EMBEDDING for path, name in own.items()}


def _pack_dense(model: Decoder, names: WeightNames, checkpoint: Checkpoint) -> None:
    """Replaces the dense linears that are stored packed, see `forms.packed_format`."""
    replaced = []
    for path, matrix in matrices(model).items():
        if not matrix.is_plain or matrix.is_embedding:
            continue
        scale = checkpoint.tensors.get(names.to_disk(f"{path}.scale"))
        weight = checkpoint.tensors.get(names.to_disk(f"{path}.weight"))
        if scale is None or weight is None or weight.dtype != mx.uint32:
            continue
        packed = PackedLinear(
            matrix.input_dims,
            matrix.output_dims,
            "bias" in matrix.layer,
            has_row_scales=scale.shape != (1,),
            has_column_scales=names.to_disk(f"{path}.input_scale") in checkpoint.tensors,
        )
        replaced.append((path, packed))
    model.update_modules(tree_unflatten(replaced))


def _check_described(checkpoint: Checkpoint) -> None:
    """Refuses packed weights whose description is lost, for example by quantising them once more."""
    tensors = checkpoint.tensors
    found = sorted(
        name
        for name, entry in tensors.items()
        if entry.dtype == mx.uint8 and f"{name}_scale" in tensors
    )
    if found:
        raise CheckpointError(
            f"[load] '{checkpoint.folder}' must say in 'quantization_config', with 'quant_method' "
            f"{bitnet_format.QUANT_METHOD} and mode offline, what the scales of {len(found)} packed "
            f"weights mean, such as that of {found[0]!r:.100}, but does not. Take config.json from "
            "the original checkpoint."
        )


def _check_packed_everywhere(model: Decoder, names: WeightNames, checkpoint: Checkpoint) -> None:
    missing = sorted(
        names.to_disk(f"{path}.scale")
        for path, matrix in matrices(model).items()
        if matrix.is_ternary and matrix.storage == "floats"
    )
    if missing:
        raise CheckpointError(
            f"[load] '{checkpoint.folder}' must hold {missing[0]!r} ({len(missing)} such tensors), "
            "since 'quantization_config' says that weights are packed, but does not. Name dense "
            "linears in 'modules_to_not_convert'."
        )


def _bitnet_forms(
    model: Decoder, described: Mapping[str, Any], names: WeightNames, checkpoint: Checkpoint
) -> dict[str, StoredForm]:
    forms: dict[str, StoredForm] = {}
    for path, matrix in matrices(model).items():
        if matrix.is_ternary and matrix.storage == "trits":
            shape = bitnet_format.packed_shape(matrix.output_dims, matrix.input_dims)
            repack = partial(bitnet_format.repack, output_dims=matrix.output_dims)
            forms[f"{path}.weight"] = StoredForm((shape,), (mx.uint8,), repack)
            read_scale = partial(bitnet_format.scale_of, described)
            forms[f"{path}.scale"] = StoredForm(((1,), ()), FLOATS, read_scale)
            if "bias" in matrix.layer and bitnet_format.scales_bias(described):
                entry = checkpoint.tensors[names.to_disk(f"{path}.scale")]
                scaled = partial(_scaled, entry, read_scale)
                forms[f"{path}.bias"] = StoredForm(((matrix.output_dims,),), FLOATS, scaled)
    return forms


def _five_trits_forms(model: Decoder) -> dict[str, StoredForm]:
    forms: dict[str, StoredForm] = {}
    for path, matrix in matrices(model).items():
        if matrix.is_ternary and matrix.storage == "trits":
            shape = five_trits.packed_shape(matrix.output_dims, matrix.input_dims)
            reading = partial(five_trits.unpack, input_dims=matrix.input_dims)
            forms[f"{path}.weight"] = StoredForm((shape,), (mx.uint8,), reading)
    return forms


def _scaled(
    entry: TensorEntry, read_scale: Callable[[mx.array], mx.array], bias: mx.array
) -> mx.array:
    scale = read_scale(read_tensor(entry))
    return (bias.astype(mx.float32) * scale).astype(bias.dtype)
