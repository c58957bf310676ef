"""Builds the model of a checkpoint without its weights, finds the tensor of each, and reads them.

MLX is lazy: a model takes no memory for weights that are replaced before they are evaluated. So a
configuration is compared with the file before anything of its size is allocated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...files.tensors import TensorEntry, read_tensor, read_tensors
from ...layers import PackedLinear, packable
from ...layers.matrix import kept_names, matrices, matrix_of, parameters, stored_layouts
from ...models import Decoder, find_described
from ...models.parts.architecture import Config
from ...models.parts.fields import section
from ...ops import ternarize_packed
from ...ops.float_dtypes import FLOATS
from ...ops.host_blocks import all_finite
from ..names import WeightNames
from .checkpoint import Checkpoint
from .forms import affine_format, bitnet_format, five_trits
from .forms.packed_format import check_packing, has_five_trits, has_valid_codes
from .forms.ternary_values import pack_ternary_values, simplify_affine

EMBEDDING = "embed.weight"
"""The matrix that a tied head shares, by its name in memory."""

_SHOWN = 5
_TIED = "Set 'tie_word_embeddings' in config.json to true if the head is the embedding."
_WAY_OUT = "Check that config.json and the weights belong together and are complete."


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


def match(
    model: Decoder, names: WeightNames, forms: dict[str, StoredForm], checkpoint: Checkpoint
) -> dict[str, TensorEntry]:
    """The tensor of each stored parameter, by the name of the parameter in memory.

    Args:
        model: The model.
        names: Names on disk and in memory.
        forms: How a parameter is stored where that differs from its form in memory, by name in memory.
        checkpoint: The checkpoint.

    Raises:
        CheckpointError: A tensor is missing, is not expected, or has another shape or dtype.
    """
    expected = parameters(model)
    copies = _scale_copies(model)
    entries: dict[str, TensorEntry] = {}
    seconds: list[tuple[str, bool, TensorEntry]] = []
    unexpected = []
    for disk_name, entry in checkpoint.tensors.items():
        name = names.to_memory(disk_name)
        if name in expected:
            entries[name] = entry
        elif name == "head.weight" and getattr(model.config, "tie_word_embeddings", False):
            seconds.append((EMBEDDING, True, entry))
        elif (second := names.second_name(disk_name)) is not None and second[0] in expected:
            seconds.append((*second, entry))
        elif not names.is_unused(disk_name) and name not in copies:
            unexpected.append(disk_name)
    copies_of = []
    for name, is_copy, entry in seconds:
        if name not in entries:
            entries[name] = entry
        elif is_copy:
            copies_of.append((entry, entries[name]))
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
    for copy, original in copies_of:
        _check_copy(copy, original, model.config)
    return entries


def _scale_copies(model: Decoder) -> set[str]:
    """The names of the scales that the affine form repeats, rounded, for each group of inputs."""
    return {
        f"{path}.{key}"
        for path, matrix in matrices(model).items()
        if matrix.is_ternary and matrix.storage == "trits"
        for key in ("scales", "biases")
    }


def _listing(checkpoint: Checkpoint, verb: str, names: list[str]) -> CheckpointError:
    shown = ", ".join(f"{name!r:.100}" for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    way_out = _TIED if names == ["lm_head.weight"] and verb == "lacks" else _WAY_OUT
    return CheckpointError(
        f"[load] '{checkpoint.folder}' {verb} tensors of this architecture: {len(names)}, namely "
        f"{shown}{more}. {way_out}"
    )


def _check_entry(entry: TensorEntry, form: StoredForm) -> None:
    if entry.shape not in form.shapes:
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must have shape {form.shapes[0]}, as "
            f"config.json says, but has {entry.shape}. {_WAY_OUT}"
        )
    if entry.dtype not in form.dtypes:
        known = ", ".join(_name(dtype) for dtype in form.dtypes)
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be {known} but is "
            f"{_name(entry.dtype)}. {_WAY_OUT}"
        )


def _check_biases(biases: TensorEntry, scales: TensorEntry) -> None:
    if biases.dtype != scales.dtype:
        raise CheckpointError(
            f"[load] tensor {biases.name!r} in '{biases.file}' must be {_name(scales.dtype)}, as "
            f"{scales.name!r} is, but is {_name(biases.dtype)}. {_WAY_OUT}"
        )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _check_copy(copy: TensorEntry, original: TensorEntry, config: Config) -> None:
    """Refuses another tensor in place of one that is tied, which many writers store once more."""
    same = (copy.shape, copy.dtype) == (original.shape, original.dtype)
    if same and mx.array_equal(_read_bits(copy), _read_bits(original)).item():
        return
    if hasattr(config, "tie_word_embeddings"):
        why = "since config.json sets 'tie_word_embeddings'"
        way_out = "Set it to false if the head is a matrix of its own."
    else:
        why = "to which this architecture ties it"
        way_out = "Leave out the one that was not trained."
    raise CheckpointError(
        f"[load] tensor {copy.name!r} in '{copy.file}' must equal {original.name!r}, {why}, but "
        f"differs. {way_out}"
    )


def _read_bits(entry: TensorEntry) -> mx.array:
    return read_tensor(entry).view(mx.uint8)


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


def fill(skeleton: Skeleton) -> Decoder:
    """Reads the weights into the model, in the dtypes of the file. Each matrix is packed as it arrives.

    Raises:
        CheckpointError: A tensor cannot be read, or is damaged.
    """
    model = skeleton.model
    modules = dict(model.named_modules())
    is_ternary = any(matrix.is_ternary for matrix in matrices(model).values())
    packs_values = skeleton.is_packed and not is_ternary
    sharing: dict[str, list[str]] = {}
    for path, name in skeleton.masters.items():
        sharing.setdefault(name, []).append(path)
    for name, array, entry in _arrays(skeleton):
        path, _, key = name.rpartition(".")
        module = modules[path]
        if name in skeleton.forms:
            array = skeleton.forms[name].read(array)
            mx.eval(array)
        for master_path in sharing.get(name, ()):
            _pack_master(modules[master_path], array, entry)
        if skeleton.masters.get(path) == name:
            continue
        setattr(module, key, array)
        matrix = matrix_of(module)
        if matrix is not None and matrix.storage == "trits" and key in matrix.kept:
            check_packed(array, key, matrix.input_dims, entry)
            continue
        check_finite(array, entry)
        is_plain = matrix is not None and matrix.is_plain and not matrix.is_embedding
        if packs_values and is_plain and key == "weight":
            modules[path] = _pack_values(model, path, module)
    if packs_values:
        simplify_affine(model)
    # frees the memory in which one float matrix after the other was read
    mx.clear_cache()
    return model


def _arrays(skeleton: Skeleton) -> Iterator[tuple[str, mx.array, TensorEntry]]:
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for name, entry in skeleton.entries.items():
        by_file.setdefault(entry.file, []).append((name, entry))
    for file, named in by_file.items():
        named.sort(key=lambda item: item[1].start)
        arrays = read_tensors(file, (entry for _, entry in named))
        for (name, entry), (_, array) in zip(named, arrays, strict=True):
            yield name, array, entry


def _pack_master(packed: nn.Module, master: mx.array, entry: TensorEntry) -> None:
    packed.weight, packed.scale = ternarize_packed(master)
    mx.eval(packed.weight, packed.scale)
    check_finite(packed.scale, entry)


def _pack_values(model: Decoder, path: str, linear: nn.Linear) -> nn.Module:
    """Packs a dense linear whose values are ternary. Any other stays as it is."""
    packed = pack_ternary_values(linear)
    if packed is None:
        return linear
    mx.eval(packed.parameters())
    model.update_modules(tree_unflatten([(path, packed)]))
    mx.clear_cache()
    return packed


def check_finite(array: mx.array, entry: TensorEntry) -> None:
    """Refuses NaN and infinity.

    Raises:
        CheckpointError: The tensor holds NaN or infinity.
    """
    # codes of MLX's affine form are whole numbers
    if mx.issubdtype(array.dtype, mx.floating) and not all_finite(array):
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be finite but holds NaN or "
            "infinity. Fetch or make the checkpoint again."
        )


def check_packed(array: mx.array, key: str, input_dims: int, entry: TensorEntry) -> None:
    """Refuses codes or scales that no ternary matrix has.

    Args:
        array: The parameter.
        key: `"weight"`, or the name of its scales.
        input_dims: The columns of the matrix.
        entry: The tensor that was read.

    Raises:
        CheckpointError: The parameter is damaged.
    """
    if key != "weight":
        check_finite(array, entry)
        is_valid, rule = mx.all(array > 0).item(), "be positive"
    else:
        is_valid = has_valid_codes(array, input_dims)
        rule = "hold ternary codes"
    if not is_valid:
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must {rule} but does not. Fetch or "
            "make the checkpoint again."
        )
