"""A model without its weights, compared with the tensors that a checkpoint holds.

MLX is lazy: a model takes no memory for weights that are replaced before they are evaluated, so a
configuration is compared with the file before anything of its size is allocated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...files.tensor_entry import TensorEntry, read_tensors
from ...layers import PackedLinear, packable
from ...layers.matrix import matrices
from ...layers.parameters import kept_names, parameters
from ...models import Decoder, find
from ...models.parts.fields import section
from ...ops.float_dtypes import FLOATS
from .checkpoint import Checkpoint
from .forms import affine_format, bitnet_format
from .forms.packed_format import check_packing
from .names import WeightNames

EMBEDDING = "embed.weight"
"""The matrix that a tied head shares, by its name in memory."""

_SHOWN = 5


@dataclass(frozen=True)
class StoredForm:
    """How a parameter is stored.

    Attributes:
        shapes: The shapes that the tensor may have.
        dtypes: The dtypes that it may have.
        read: Turns the tensor into the parameter.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    read: Callable[[mx.array], mx.array]


@dataclass
class Skeleton:
    """A model that waits for its weights.

    Attributes:
        model: The model; its linears are packed where the checkpoint's are, or everywhere.
        names: Names on disk and in memory.
        entries: For each parameter that is stored, by its name in memory, its tensor on disk.
        forms: By the same names, how a parameter is stored where that is not as it is in memory.
        training: By their paths, the training forms of linears that are stored packed.
        masters: For each linear that is packed here and not on disk, by its path, the name in memory
            of its float matrix: its own, or that of the embedding it shares.
        is_packed: Whether all that can be packed without loss is to be.
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
        packed: Pack the ternary linears that it stores as floats.

    Raises:
        UnsupportedModelError: The architecture or an option is not implemented.
        CheckpointError: The configuration is damaged, or the tensors do not belong to it.
    """
    architecture = find(checkpoint.config.get("model_type"))
    check_packing(checkpoint.config, architecture.packed_forms)
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
    forms: dict[str, StoredForm] = {}
    if bitnet_format.is_packed(described):
        _check_packed_everywhere(model, names, checkpoint)
        forms = _bitnet_forms(model, described, names, checkpoint)
    else:
        _check_described(checkpoint)
    entries = _match(model, names, forms, checkpoint)
    masters = _pack_masters(model, entries) if packed else {}
    return Skeleton(model, names, entries, forms, training, masters, packed)


def _pack(model: Decoder, modules: Mapping[str, nn.Module]) -> None:
    packed = [(path, module.to_packed()) for path, module in modules.items()]
    model.update_modules(tree_unflatten(packed))


def _pack_masters(model: Decoder, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Packs what has a training form; gives the name of the float matrix of each."""
    modules = packable(model)
    _pack(model, modules)
    own = {path: f"{path}.weight" for path in modules}
    return {path: name if name in entries else EMBEDDING for path, name in own.items()}


def _pack_dense(model: Decoder, names: WeightNames, checkpoint: Checkpoint) -> None:
    """Makes room for dense linears that are stored packed, see `hub.checkpoint.forms.packed_format`."""
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
    """Refuses packed weights whose description is lost, as by quantising them once more."""
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


def _scaled(
    entry: TensorEntry, read_scale: Callable[[mx.array], mx.array], bias: mx.array
) -> mx.array:
    [(_, scale)] = read_tensors(entry.file, [entry])
    return (bias.astype(mx.float32) * read_scale(scale)).astype(bias.dtype)


def _match(
    model: Decoder, names: WeightNames, forms: dict[str, StoredForm], checkpoint: Checkpoint
) -> dict[str, TensorEntry]:
    expected = parameters(model)
    copies = _scale_copies(model)
    entries: dict[str, TensorEntry] = {}
    tied_copies = []
    unexpected = []
    for disk_name, entry in checkpoint.tensors.items():
        name = names.to_memory(disk_name)
        if name in expected:
            entries[name] = entry
        elif name == "head.weight" and getattr(model.config, "tie_word_embeddings", False):
            tied_copies.append(entry)
        elif not names.is_unused(disk_name) and name not in copies:
            unexpected.append(disk_name)
    missing = [names.to_disk(name) for name in expected if name not in entries]
    if missing:
        raise _listing(checkpoint, "lacks", missing)
    if unexpected:
        raise _listing(checkpoint, "has unexpected", unexpected)
    kept = kept_names(model)
    for name, array in expected.items():
        allowed = FLOATS if array.dtype in FLOATS and name not in kept else (array.dtype,)
        form = forms.get(name, StoredForm((array.shape,), allowed, mx.array))
        _check_entry(entries[name], form)
        if name.endswith(".biases"):
            _check_biases(entries[name], entries[name.removesuffix("biases") + "scales"])
    for entry in tied_copies:
        _check_tied_copy(entry, entries[EMBEDDING])
    return entries


def _scale_copies(model: Decoder) -> set[str]:
    """Names of the scales that the affine form repeats, rounded, for each group of inputs."""
    return {
        f"{path}.{key}"
        for path, matrix in matrices(model).items()
        if matrix.is_ternary and matrix.storage == "trits"
        for key in ("scales", "biases")
    }


def _listing(checkpoint: Checkpoint, verb: str, names: list[str]) -> CheckpointError:
    shown = ", ".join(f"{name!r:.100}" for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return CheckpointError(
        f"[load] '{checkpoint.folder}' {verb} tensors of this architecture: {len(names)}, namely "
        f"{shown}{more}. Check that config.json and the weights belong together and are complete."
    )


def _check_entry(entry: TensorEntry, form: StoredForm) -> None:
    if entry.shape not in form.shapes:
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must have shape {form.shapes[0]}, as "
            f"config.json says, but has {entry.shape}."
        )
    if entry.dtype not in form.dtypes:
        known = ", ".join(_name(dtype) for dtype in form.dtypes)
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be {known} but is "
            f"{_name(entry.dtype)}."
        )


def _check_biases(biases: TensorEntry, scales: TensorEntry) -> None:
    if biases.dtype != scales.dtype:
        raise CheckpointError(
            f"[load] tensor {biases.name!r} in '{biases.file}' must be {_name(scales.dtype)}, as "
            f"{scales.name!r} is, but is {_name(biases.dtype)}."
        )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _check_tied_copy(copy: TensorEntry, embedding: TensorEntry) -> None:
    """Many writers store a tied head once more; another matrix would change the model."""
    same = (copy.shape, copy.dtype) == (embedding.shape, embedding.dtype)
    if not same or not mx.array_equal(_read_bits(copy), _read_bits(embedding)).item():
        raise CheckpointError(
            f"[load] tensor {copy.name!r} in '{copy.file}' must equal {embedding.name!r}, since "
            "config.json sets 'tie_word_embeddings', but differs. Set it to false if the head is "
            "a matrix of its own."
        )


def _read_bits(entry: TensorEntry) -> mx.array:
    [(_, array)] = read_tensors(entry.file, [entry])
    return array.view(mx.uint8)
