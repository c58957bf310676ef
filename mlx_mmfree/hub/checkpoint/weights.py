"""Builds the model of a checkpoint without its weights, finds the tensor of each, and reads them.

MLX is lazy: a model takes no memory for weights that are replaced before they are evaluated. So a
configuration is compared with the file before anything of its size is allocated.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...files.tensors import TensorEntry, read_tensor, read_tensors, stacked
from ...layers import packable
from ...layers.matrix import (
    Matrix,
    StoredLayout,
    fixed_dtype_names,
    matrices,
    matrix_of,
    parameters,
    stored_layouts,
)
from ...models import Decoder, find_described
from ...models.parts.architecture import Config, WeightNames
from ...ops import ternarize_packed
from ...ops.device import FLOATS
from ...ops.host_blocks import all_finite, has_valid_codes
from .checkpoint import Checkpoint
from .weight_format import StoredTensor, UnreadMatrix, described_formats, weight_formats

EMBEDDING = "embed.weight"
"""The matrix that a tied head shares, by its name in memory."""

_SHOWN = 5
_TIED = "Set 'tie_word_embeddings' in config.json to true if the head is the embedding."
_HINT = "Check that config.json and the weights belong together and are complete."


@dataclass
class Skeleton:
    """A model that waits for its weights.

    Attributes:
        model: The model. Its linears are packed where the checkpoint's are, or everywhere.
        names: Names on disk and in memory.
        entries: The tensor on disk of each stored parameter, by its name in memory.
        stored: How a parameter is stored where that differs from its format in memory, by the same
            names.
        training: The training variants of ternary linears that are stored packed, by their paths.
        masters: The float matrix of each linear that is packed here but not on disk, by its path. It is
            given by its name in memory and may be the embedding that a tied head shares.
        is_packed: Whether everything that can be packed without loss is to be packed.
        is_simplified: Whether that may be any matrix, since none is ternary by design.
        left_out: The parts of the file that are never read, as text.
        layouts: How float arrays lie in the file that differ in memory, by their names in memory.
    """

    model: Decoder
    names: WeightNames
    entries: dict[str, TensorEntry]
    stored: dict[str, StoredTensor]
    training: dict[str, nn.Module]
    masters: dict[str, str]
    is_packed: bool
    is_simplified: bool
    left_out: tuple[str, ...]
    layouts: Mapping[str, StoredLayout]


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
    described = described_formats(checkpoint.config, architecture.packed_formats)
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    if architecture.newer_name is not None:
        newer = {name: architecture.newer_name(name, shapes) for name in shapes}
        checkpoint = _renamed(checkpoint, newer)
        # a description may speak of single modules
        described = [
            (format, _with_newer_keys(description, architecture.newer_name, shapes))
            for format, description in described
        ]
    tensors = checkpoint.tensors
    rotated = [each for each in described if each[0].precedes]
    if not rotated and (signs := [name for name in tensors if name.endswith(".signs")]):
        raise _lost_rotation(checkpoint, signs[0])
    names = WeightNames(architecture.weight_names)
    if names.stacked:
        tensors = _stacked(tensors, names)
        checkpoint = replace(checkpoint, tensors=tensors)
    model = architecture.build(architecture.config.from_hub(checkpoint.config))
    formats: dict[str, StoredTensor] = {}
    modules, matrices_of = dict(model.named_modules()), matrices(model)
    on_disk = names.modules_to_disk(matrices_of)
    parts: dict[str, dict[str, TensorEntry]] = {name: {} for name in on_disk.values()}
    for name, entry in tensors.items():
        module, _, key = name.rpartition(".")
        parts.setdefault(module, {})[key] = entry
    replaced: dict[str, nn.Module] = {}
    copies: set[str] = set()
    made: dict[str, Mapping[str, TensorEntry]] = {}
    for format, description in (*rotated, *(each for each in described if each not in rotated)):
        unread = {
            path: UnreadMatrix(matrices_of[path], name, parts[name], description)
            for path, name in on_disk.items()
            if path not in replaced
        }
        for path, found in format.open(unread).items():
            replaced[path] = found.layer
            formats |= {f"{path}.{key}": tensor for key, tensor in found.tensors.items()}
            copies |= {f"{on_disk[path]}.{key}" for key in found.copies}
            if found.entries:
                made[on_disk[path]] = found.entries
    if made:
        rest = {name: each for name, each in tensors.items() if name.rpartition(".")[0] not in made}
        own = {f"{name}.{key}": each for name, keys in made.items() for key, each in keys.items()}
        tensors = rest | own
        checkpoint = replace(checkpoint, tensors=tensors)
    model.update_modules(tree_unflatten(list(replaced.items())))
    arrays = parameters(model)
    layouts = stored_layouts(model)
    if architecture.layouts is not None:
        layouts |= architecture.layouts(model, shapes, checkpoint.writer)
    for name, layout in layouts.items():
        if arrays[name].dtype in FLOATS:
            formats.setdefault(name, StoredTensor((layout.shape,), FLOATS, layout.read))
    ternary = {path: modules[path] for path, matrix in matrices_of.items() if matrix.is_ternary}
    format, description = described[0]
    floats = [on_disk[path] for path in ternary.keys() - replaced]
    is_covered = format.covers is not None and format.covers(description)
    octets = [] if is_covered else [n for n, e in tensors.items() if e.dtype == mx.uint8]
    if (is_covered and floats) or any(f"{name}_scale" in tensors for name in octets):
        raise _wrongly_described(checkpoint, floats if is_covered else [])
    entries = match(model, names, formats, copies, checkpoint)
    masters = _pack_masters(model, entries) if packed and floats else {}
    training = {path: layer for path, layer in ternary.items() if path in replaced}
    used = {id(entry) for entry in entries.values()}
    unused = [name for name, entry in tensors.items() if id(entry) not in used]
    left_out = tuple(sorted({words for name in unused if (words := names.left_out(name))}))
    is_simplified = packed and not ternary
    return Skeleton(
        model, names, entries, formats, training, masters, packed, is_simplified, left_out, layouts
    )


def _renamed(checkpoint: Checkpoint, newer: Mapping[str, str]) -> Checkpoint:
    """The checkpoint with its tensors by the names that their architecture has for them now."""
    tensors = {newer[name]: entry for name, entry in checkpoint.tensors.items()}
    if len(tensors) < len(newer):
        raise CheckpointError(
            f"[load] '{checkpoint.folder}' must hold each tensor once but holds some under two names. "
            f"{_HINT}"
        )
    return replace(checkpoint, tensors=tensors)


def _with_newer_keys(
    description: Any, newer_name: Callable[[str, Collection[str]], str], names: Collection[str]
) -> Any:
    """A description whose keys may be modules, by the names that the architecture has for them now."""
    if not isinstance(description, Mapping):
        return description
    return {newer_name(key, names): each for key, each in description.items()}


def _lost_rotation(checkpoint: Checkpoint, signs: str) -> CheckpointError:
    """The error for signs of a rotation that the configuration does not mention."""
    return CheckpointError(
        f"[load] '{checkpoint.folder}' holds signs of a rotation, such as {signs!r:.100}, but "
        "config.json says nothing of rotated weights. Without the rotation the model would write "
        "nonsense. Take config.json from the original checkpoint."
    )


def _stacked(tensors: Mapping[str, TensorEntry], names: WeightNames) -> dict[str, TensorEntry]:
    """The tensors, with the parts of one that is stacked in memory as one."""
    found: dict[str, TensorEntry] = {}
    stacks: dict[str, dict[int, TensorEntry]] = {}
    for name, entry in tensors.items():
        if (position := names.stack_of(name)) is None:
            found[name] = entry
        else:
            stacks.setdefault(position[0], {})[position[1]] = entry
    for name, parts in stacks.items():
        formats = {(part.shape, part.dtype) for part in parts.values()}
        if name in found or sorted(parts) != list(range(len(parts))) or len(formats) > 1:
            first = next(iter(parts.values()))
            raise CheckpointError(
                f"[load] '{first.file}' must hold tensors like {first.name!r:.100} of one shape and "
                f"dtype, numbered from 0 without a gap, and not {name!r:.100} beside them, but does "
                "not. Fetch the checkpoint again."
            )
        found[name] = stacked([parts[number] for number in range(len(parts))], name)
    return found


def _pack_masters(model: Decoder, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Packs the linears in their training variant, and gives the names of their float matrices."""
    modules = packable(model)
    packed = [(path, module.to_packed()) for path, module in modules.items()]
    model.update_modules(tree_unflatten(packed))
    own = {path: f"{path}.weight" for path in modules}
    return {path: name if name in entries else EMBEDDING for path, name in own.items()}


def _wrongly_described(checkpoint: Checkpoint, floats: Sequence[str]) -> CheckpointError:
    """The error for packed weights that are incomplete, or whose description is lost."""
    if floats:
        missing = sorted(f"{name}.weight_scale" for name in floats)
        return CheckpointError(
            f"[load] '{checkpoint.folder}' must hold {missing[0]!r} ({len(missing)} such tensors), "
            "since 'quantization_config' says that weights are packed, but does not. Name dense "
            "linears in 'modules_to_not_convert'."
        )
    tensors = checkpoint.tensors
    found = sorted(n for n, e in tensors.items() if e.dtype == mx.uint8 and f"{n}_scale" in tensors)
    return CheckpointError(
        f"[load] '{checkpoint.folder}' must say in 'quantization_config', with 'quant_method' bitnet "
        f"and mode offline, what the scales of {len(found)} packed weights mean, such as the scale of "
        f"{found[0]!r:.100}, but does not. Take config.json from the original checkpoint."
    )


def match(
    model: Decoder,
    names: WeightNames,
    stored: Mapping[str, StoredTensor],
    copies: set[str],
    checkpoint: Checkpoint,
) -> dict[str, TensorEntry]:
    """The tensor of each stored parameter, by the name of the parameter in memory.

    Args:
        model: The model.
        names: Names on disk and in memory.
        stored: How a parameter is stored where that differs from its format in memory, by name in
            memory.
        copies: The names on disk of tensors that repeat others, and may be there.
        checkpoint: The checkpoint.

    Raises:
        CheckpointError: A tensor is missing, is not expected, or has another shape or dtype.
    """
    expected, unchanged = parameters(model), fixed_dtype_names(model)
    in_memory = {name: names.to_memory(name) for name in checkpoint.tensors}
    entries: dict[str, TensorEntry] = {}
    seconds: list[tuple[str, bool, TensorEntry]] = []
    unexpected = []
    for disk_name, entry in checkpoint.tensors.items():
        name = in_memory[disk_name]
        if name in expected:
            entries[name] = entry
        elif name == "head.weight" and getattr(model.config, "tie_word_embeddings", False):
            seconds.append((EMBEDDING, True, entry))
        elif (second := names.second_name(disk_name)) is not None and second[0] in expected:
            seconds.append((*second, entry))
        elif not names.is_unused(disk_name) and disk_name not in copies:
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
    for name, array in expected.items():
        allowed = FLOATS if array.dtype in FLOATS and name not in unchanged else (array.dtype,)
        wanted = stored.get(name, StoredTensor((array.shape,), allowed, mx.array))
        if entries[name].shape not in wanted.shapes or entries[name].dtype not in wanted.dtypes:
            raise _mismatch(entries[name], wanted)
    for copy, original in copies_of:
        _check_copy(copy, original, model.config)
    return entries


def _listing(checkpoint: Checkpoint, verb: str, names: list[str]) -> CheckpointError:
    shown = ", ".join(f"{name!r:.100}" for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    hint = _TIED if names == ["lm_head.weight"] and verb == "lacks" else _HINT
    return CheckpointError(
        f"[load] '{checkpoint.folder}' {verb} tensors of this architecture: {len(names)}, namely "
        f"{shown}{more}. {hint}"
    )


def _mismatch(entry: TensorEntry, stored: StoredTensor) -> CheckpointError:
    """The error for a tensor of another shape or dtype."""
    rule = f"have shape {stored.shapes[0]}, as config.json says, but has {entry.shape}"
    if entry.shape in stored.shapes:
        *known, got = (
            str(dtype).removeprefix("mlx.core.") for dtype in (*stored.dtypes, entry.dtype)
        )
        rule = f"be {', '.join(known)} but is {got}"
    return CheckpointError(f"[load] tensor {entry.name!r} in '{entry.file}' must {rule}. {_HINT}")


def _check_copy(copy: TensorEntry, original: TensorEntry, config: Config) -> None:
    """Refuses another tensor in place of one that is tied, which many writers store once more."""
    if (copy.shape, copy.dtype) == (original.shape, original.dtype):
        one, other = (read_tensor(entry).view(mx.uint8) for entry in (copy, original))
        if mx.array_equal(one, other).item():
            return
    if hasattr(config, "tie_word_embeddings"):
        why = "since config.json sets 'tie_word_embeddings'"
        hint = "Set it to false if the head is a matrix of its own."
    else:
        why = "to which this architecture ties it"
        hint = "Leave out the one that was not trained."
    raise CheckpointError(
        f"[load] tensor {copy.name!r} in '{copy.file}' must equal {original.name!r}, {why}, but "
        f"differs. {hint}"
    )


Simplify = Callable[[Matrix], nn.Module | None]


def _simpler_formats(modules: Mapping[str, Matrix]) -> tuple[list[Simplify], set[str]]:
    """The function that makes a layer of fewer bits, and the weights of float matrices that it needs."""
    simpler = [
        format.simplify for format in weight_formats().values() if format.simplify is not None
    ]
    floats = [p for p, matrix in modules.items() if matrix.is_plain and not matrix.is_embedding]
    return simpler, {f"{path}.weight" for path in floats}


_PROBED_ROWS = 4


def exact_floats(skeleton: Skeleton) -> set[str]:
    """The float32 tensors that are no matrices, by their names in memory.

    Gains, biases, taps and rates can stay so beside activations of 16 bits.
    """
    modules = matrices(skeleton.model)
    found = (name for name, each in skeleton.entries.items() if each.dtype == mx.float32)
    parts = ((name, *name.rpartition(".")) for name in found)
    return {name for name, path, _, key in parts if path not in modules or key == "bias"}


def simplified_bytes(skeleton: Skeleton, dtype: mx.Dtype | None) -> dict[str, int]:
    """The bytes of float matrices that `fill` packs, by their weights, as their first rows tell.

    Args:
        skeleton: A model before `fill`.
        dtype: The dtype of its floats; `None` keeps each.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    modules, found = matrices(skeleton.model), {}
    simpler, plain = _simpler_formats(modules) if skeleton.is_simplified else ([], set())
    for name in sorted(plain & skeleton.entries.keys()):
        entry, matrix = skeleton.entries[name], modules[name.removesuffix(".weight")]
        first, dims = entry.parts[0] if entry.parts else entry, matrix.input_dims
        rows = min(math.prod(first.shape[:-1]), _PROBED_ROWS)
        if first.decode is not None or first.shape[-1] != dims:
            continue
        stop = first.start + rows * dims * first.dtype.size
        linear = nn.Linear(1, 1, bias=False)
        linear.weight = read_tensor(replace(first, shape=(rows, dims), stop=stop, checksum=None))
        probed = matrix_of(linear)
        layers = (simplify(probed) for simplify in simpler if probed is not None)
        layer: Any = next((each for each in layers if each is not None), None)
        if layer is not None:
            # of a row, but for scales of columns
            floats = dtype or first.dtype
            sizes = {key: array.nbytes for key, array in parameters(layer).items()}
            sizes |= {k: layer[k].size * floats.size for k in ("scales", "biases") if k in layer}
            columns = sizes.pop("input_scale", 0)
            found[name] = sum(sizes.values()) * matrix.output_dims // rows + columns
    return found


def fill(skeleton: Skeleton) -> Decoder:
    """Reads the weights into the model, in the dtypes of the file. Each matrix is packed as it arrives.

    Raises:
        CheckpointError: A tensor cannot be read, or is damaged.
    """
    model, entries = skeleton.model, skeleton.entries
    modules, matrices_of = dict(model.named_modules()), matrices(model)
    simpler, plain = _simpler_formats(matrices_of) if skeleton.is_simplified else ([], set())
    sharing: dict[str, list[str]] = {}
    for path, name in skeleton.masters.items():
        sharing.setdefault(name, []).append(path)
    by_file: dict[Path, list[str]] = {}
    for name in sorted(entries, key=lambda name: entries[name].start):
        by_file.setdefault(entries[name].file, []).append(name)
    arrays: dict[str, mx.array] = {}
    for file, names in by_file.items():
        read = read_tensors(file, [entries[name] for name in names])
        for name, (_, array) in zip(names, read, strict=True):
            path = name.rpartition(".")[0]
            if name in skeleton.stored:
                array = skeleton.stored[name].read(array)
                mx.eval(array)
            for master in sharing.get(name, ()):
                words, scale = ternarize_packed(array)
                mx.eval(words, scale)
                check_finite(scale, entries[name])
                modules[master].weight, modules[master].scale = words, scale
            if name in plain:
                check_finite(array, entries[name])
                modules[path].weight = array
                modules[path] = _simplified(model, path, matrices_of[path], simpler)
            elif skeleton.masters.get(path) != name:
                arrays[name] = array
    floats = [name for name, array in arrays.items() if mx.issubdtype(array.dtype, mx.floating)]
    broken = [name for name in floats if not all_finite(arrays[name])]
    if broken:
        check_finite(arrays[broken[0]], entries[broken[0]])
    mx.eval(list(arrays.values()))
    for name, array in arrays.items():
        path, _, key = name.rpartition(".")
        modules[path][key] = array
    check_packed(matrices_of, arrays, entries)
    for path, matrix in matrices(model).items() if simpler else ():
        if matrix.is_packed:
            _simplified(model, path, matrix, simpler)
    # frees the memory in which one float matrix after the other was read
    mx.clear_cache()
    return model


def _simplified(
    model: Decoder, path: str, matrix: Matrix, simpler: Sequence[Callable[[Matrix], Any]]
) -> nn.Module:
    """The layer of a loaded matrix, which takes a format of fewer bits if that loses nothing."""
    for simplify in simpler:
        layer: nn.Module | None = simplify(matrix)
        if layer is not None:
            mx.eval(layer.parameters())
            model.update_modules(tree_unflatten([(path, layer)]))
            mx.clear_cache()
            return layer
    return matrix.layer


def check_finite(array: mx.array, entry: TensorEntry) -> None:
    """Refuses NaN and infinity.

    Raises:
        CheckpointError: The tensor holds NaN or infinity.
    """
    if not all_finite(array):
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be finite but holds NaN or "
            "infinity. Fetch or make the checkpoint again."
        )


def check_packed(
    packed_in: Mapping[str, Matrix],
    arrays: Mapping[str, mx.array],
    entries: Mapping[str, TensorEntry],
) -> None:
    """Refuses codes or scales that no ternary matrix has.

    Args:
        packed_in: The matrices of a model by their paths.
        arrays: Parameters that were read, by their names in memory.
        entries: Their tensors, by the same names.

    Raises:
        CheckpointError: A parameter is damaged.
    """
    packed = {path: matrix for path, matrix in packed_in.items() if matrix.holds_trits}
    inputs = {f"{path}.weight": matrix.input_dims for path, matrix in packed.items()}
    scales = {
        f"{path}.{key}" for path, matrix in packed.items() for key in matrix.fixed_dtypes
    } - inputs.keys()
    broken = {
        name: "hold ternary codes"
        for name, dims in inputs.items()
        if name in arrays and not has_valid_codes(arrays[name], dims)
    }
    broken |= {
        name: "be positive"
        for name in scales & arrays.keys()
        if not mx.all(arrays[name] > 0).item()
    }
    for name, rule in sorted(broken.items()):
        entry = entries[name]
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must {rule} but does not. Fetch or "
            "make the checkpoint again."
        )
