"""Reads a GGUF file as a checkpoint of the Hub: its configuration, tokenizer files and tensors.

Ternary linears keep their trits and their one scale in two cases:

- I2_S, which bitnet.cpp multiplies with 8-bit activations, in every architecture;
- TQ1_0, TQ2_0 and Q2_0 in the BitNet architectures, whose activations have 8 bits.

A Llama in TQ1_0 or TQ2_0 says nothing about its activations. So they stay floats, and its linears are
dense with exactly the stored values. Q1_0, Q2_0, PQ2_0 and PTQ1_0 may have a scale for each block. Such
matrices keep their codes of 1 or 2 bits without loss. All other types become floats.
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, UnsupportedModelError, show_as
from ...files.checkpoint_files import GENERATION_FILE, VOCABULARY_FILES
from ...files.gguf_blocks import dequantized
from ...files.gguf_file import StoredTensor, read_parts
from ...files.reading import UNREADABLE, check_link, json_text, parse_json, tokenizer_files
from ...files.tensors import TensorEntry, read_tensor
from ...files.writing import new_scratch_folder, writing
from ...models import find
from ...models.parts.architecture import GGUFFormat
from ...tokenizer.from_gguf import files_of_metadata
from ...tokenizer.sampling_defaults import sampling_of_gguf
from ...tokenizer.vocabulary import MAX_VOCABULARY_BYTES, read_limited
from . import gguf_config
from .embedding_files import files_of_pooling, with_embedding
from .rotated_floats import without_rotated_floats
from .weight_format import WRITER_KEY, GGUFMatrix, WeightFormat, rotated_format, weight_formats

FLOAT_TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""The types of GGUF that hold plain floats."""

_LINEAR = re.compile(r"(model\.layers\.[0-9]+\.(?:self_attn|mlp)\.(\w+_proj))\.weight", re.ASCII)
_ROTATED = re.compile(r"model\.layers\.[0-9]+\.self_attn\.([qk])_proj\.(?:weight|bias)", re.ASCII)
_EMBEDDING = "token_embd.weight"


def read_gguf_checkpoint(
    file: Path, tokenizer_folder: Path | None = None
) -> tuple[Path, dict[str, Any], dict[str, TensorEntry], mx.Dtype | None]:
    """Reads everything in a file except the data of its tensors.

    Args:
        file: The file.
        tokenizer_folder: A folder whose tokenizer files, if any, are preferred to the file's vocabulary.
            Those beside a file without a vocabulary are read in any case.

    Returns:
        A folder of this process with `config.json` and the tokenizer files, the configuration, the
        tensors by their names on the Hub, and the dtype to compute in, `None` for each tensor's own.

    Raises:
        CheckpointError: The file is damaged or inconsistent.
        UnsupportedModelError: It asks for something that is not implemented.
    """
    if tokenizer_folder is not None:
        _check_link(file)
    metadata, found = read_parts(file)
    architecture = gguf_config.find_format(metadata)
    rotation = rotated_format()
    rotation.check(metadata, architecture)
    has_norms = any(tensor.name.endswith("_norm_in.weight") for _, tensor in found)
    if has_norms:
        architecture = replace(architecture, is_ternary=True)
    stored = {tensor.name: (part, tensor) for part, tensor in found}
    _, embedding = stored.get(_EMBEDDING, (file, None))
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"[GGUF] '{file}' must hold the matrix {_EMBEDDING!r} but does not. Fetch it again."
        )
    is_tied = "output.weight" not in stored
    factors = _rope_factors(stored)
    config = gguf_config.hub_config(
        metadata, embedding.shape[0], is_tied=is_tied, rope_factors=factors
    )
    mark = f"{WRITER_KEY}."
    config[WRITER_KEY] = {
        key.removeprefix(mark): value for key, value in metadata.items() if key.startswith(mark)
    }
    rotated, signs = rotation.open(file, metadata, stored, architecture)
    as_on_hub = rotation.names(metadata)
    read, others = list(stored.values()), dict[str, TensorEntry]()
    if architecture.left_out:
        blocks = gguf_config.model_blocks(metadata, architecture)
        others = _left_out(read, blocks)
        read = [each for each in read if not gguf_config.is_left_out(each[1].name, blocks)]
    tensors, quantization = _hub_tensors(file, read, architecture, config, as_on_hub)
    tensors |= others
    tensors |= {entry.name: entry for entry in signs}
    for section, modules in rotated.items():
        rotated[section], tensors = without_rotated_floats(modules, tensors)
    config |= {**quantization, **rotated}
    config |= _add_biases(file, tensors)
    prefix = metadata["general.architecture"]
    pooling = files_of_pooling(metadata.get(f"{prefix}.pooling_type"))
    config = with_embedding(config, has_norms, bool(pooling) or (has_norms and is_tied))
    # beside codes, as llama.cpp computes: the norms are float32, and floats of a dtype of 16 bits rare
    own = gguf_config.hub_name(_EMBEDDING, architecture).removesuffix(".weight")
    in_codes = bool(embedding.kind.code_bits) or f"{own}.scales" in tensors
    dtype: mx.Dtype | None = FLOAT_TYPES.get(embedding.kind.name, mx.float16)
    dtype = mx.float32 if in_codes else dtype
    described = find(config["model_type"])
    if described.layouts is not None and embedding.kind.name in FLOAT_TYPES and not in_codes:
        # as from other files: the whole gain of a norm takes more bits than 16
        dtype = None
    elif described.needs_range and dtype == mx.float16:
        # trained in bfloat16, whose range the squares of ReLU need
        dtype = mx.bfloat16
    files = _tokenizer_files(tokenizer_folder) or files_of_metadata(metadata)
    files = files or _tokenizer_files(file.parent)
    files |= _with_sampling(metadata, files)
    return _folder(file, config, files | pooling), config, tensors, dtype


def _with_sampling(metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The `generation_config.json`, with what the metadata say of sampling where it says nothing."""
    values, unread = sampling_of_gguf(metadata)
    if unread:
        print(
            f"note: {', '.join(map(repr, unread))} of the GGUF file are not read.", file=sys.stderr
        )
    if not values:
        return {}
    # one that is damaged is refused where it is read
    with suppress(ValueError, TypeError):
        values |= parse_json(files.get(GENERATION_FILE, b"{}"))
        return {GENERATION_FILE: json_text(values).encode()}
    return {}


def _hub_tensors(
    file: Path,
    stored: Iterable[tuple[Path, StoredTensor]],
    architecture: GGUFFormat,
    config: Mapping[str, Any],
    rotated: Collection[str],
) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """The tensors by their names on the Hub, and what `config.json` says of how they are stored.

    The inputs of rotated matrices lie as on the Hub.
    """
    tensors: dict[str, TensorEntry] = {}
    linears = ["lm_head"]
    by_format: dict[str, dict[str, StoredTensor]] = {}
    for part, tensor in stored:
        format, entries = _entries(part, tensor, architecture, config, rotated)
        for entry in entries:
            if entry.name in tensors:
                raise CheckpointError(
                    f"[GGUF] '{file}' must hold each tensor once but repeats {tensor.name!r:.100}. "
                    "Fetch it again."
                )
            tensors[entry.name] = entry
        name = gguf_config.hub_name(tensor.name, architecture)
        module = name.removesuffix(".weight")
        if format is not None:
            by_format.setdefault(format.name, {})[module] = tensor
        if _LINEAR.fullmatch(name) is not None:
            linears.append(module)
    described: dict[str, Any] = {}
    for format in weight_formats().values():
        if format.gguf is not None and (own := by_format.get(format.name)):
            others = [module for module in linears if module not in own]
            described |= format.gguf.describe(own, others)
    return tensors, described


def _left_out(stored: Iterable[tuple[Path, StoredTensor]], blocks: int) -> dict[str, TensorEntry]:
    """The tensors after the model's blocks, by names of the Hub that are never read."""
    others = [each for each in stored if gguf_config.is_left_out(each[1].name, blocks)]
    entries = (_in_floats(GGUFMatrix(file, each, f"mtp.{each.name}")) for file, each in others)
    return {entry.name: entry for entry in entries}


def _add_biases(file: Path, tensors: dict[str, TensorEntry]) -> dict[str, Any]:
    """Adds zeros where a bias is left out beside others, and returns keys of `config.json`."""
    linears = [linear for name in tensors if (linear := _LINEAR.fullmatch(name)) is not None]
    keys: dict[str, Any] = {}
    for key, part in (("attention_bias", ".self_attn."), ("mlp_bias", ".mlp.")):
        modules = [linear[1] for linear in linears if part in linear[1]]
        keys[key] = any(f"{module}.bias" in tensors for module in modules)
        for module in modules if keys[key] else ():
            name, shape = f"{module}.bias", tensors[f"{module}.weight"].shape[:1]
            zeros = partial(_zeros, shape)
            tensors.setdefault(name, TensorEntry(name, file, mx.float32, shape, 0, 0, decode=zeros))
    return keys


def _zeros(shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
    return np.zeros(shape, np.uint32)


def _rope_factors(stored: dict[str, tuple[Path, StoredTensor]]) -> dict[str, np.ndarray]:
    """Takes the tensors with a factor for each pair of a head's dims out, for the configuration."""
    found = {}
    for name in (gguf_config.ROPE_FACTORS, gguf_config.SHORT_FACTORS, gguf_config.LONG_FACTORS):
        if name in stored:
            part, tensor = stored.pop(name)
            gguf_config.check_rope_factors(name, tensor.shape)
            _, [entry] = _entries(part, tensor, GGUFFormat({}), {})
            found[name] = np.asarray(read_tensor(entry).astype(mx.float32))
    return found


def _entries(
    file: Path,
    tensor: StoredTensor,
    architecture: GGUFFormat,
    config: Mapping[str, Any],
    rotated: Collection[str] = (),
) -> tuple[WeightFormat | None, list[TensorEntry]]:
    """The tensors that the Hub would have for one of the file, and the format in which they are."""
    name = gguf_config.hub_name(tensor.name, architecture)
    linear = _LINEAR.fullmatch(name)
    kind, shape = tensor.kind, tensor.shape
    order = None
    turned = _ROTATED.fullmatch(name)
    if turned is not None and architecture.rotates_pairs:
        key = "num_attention_heads" if turned[1] == "q" else "num_key_value_heads"
        order = _rows_by_halves(tensor, config[key])
    axis, heads = architecture.heads(name, config) or (0, None)
    if heads is not None and (len(shape) <= axis or shape[axis] != len(heads)):
        raise CheckpointError(
            f"[GGUF] tensor {tensor.name!r:.100} must have {len(heads)} numbers along axis {axis} but "
            f"has shape {shape}. Fetch the file again."
        )
    if axis == 0:
        order = heads if heads is not None else order
    elif tensor.name not in rotated:
        return _by_columns(GGUFMatrix(file, tensor, name), cast(np.ndarray, heads))
    is_ternary = kind.codes is not None and (architecture.is_ternary or kind.has_one_scale)
    if linear is not None and architecture.is_ternary and not is_ternary:
        raise UnsupportedModelError(
            f"[GGUF] tensor {tensor.name!r:.100} must be stored as I2_S, TQ1_0, TQ2_0 or Q2_0 in this "
            f"architecture but is stored as {kind.name}. Use a file with ternary tensors."
        )
    is_ternary = is_ternary and linear is not None and len(shape) == 2
    matrix = GGUFMatrix(file, tensor, name, order, is_ternary)
    format, entries = _in_format(matrix)
    return format, entries or [_in_floats(matrix)]


def _in_format(matrix: GGUFMatrix) -> tuple[WeightFormat | None, list[TensorEntry]]:
    """The tensors of a few-bit format that holds the matrix without loss; none without such a format."""
    for format in weight_formats().values():
        if format.gguf is not None and (entries := format.gguf.open(matrix)):
            return format, entries
    return None, []


def _in_floats(matrix: GGUFMatrix) -> TensorEntry:
    kind, shape = matrix.tensor.kind, matrix.tensor.shape
    if kind.name in FLOAT_TYPES:
        dtype = FLOAT_TYPES[kind.name]
        if matrix.order is None:
            return matrix.entry(matrix.name, dtype, shape)
        return matrix.entry_of_rows(matrix.name, dtype, shape, partial(_plain, dtype.size, shape))
    dtype = mx.float16 if kind.codes is not None and not kind.has_one_scale else mx.float32
    return matrix.entry_of_rows(matrix.name, dtype, shape, partial(dequantized, kind, shape=shape))


def _by_columns(
    matrix: GGUFMatrix, order: np.ndarray
) -> tuple[WeightFormat | None, list[TensorEntry]]:
    """A matrix whose inputs lie in another order: in codes if whole blocks move, else as floats."""
    block = max(matrix.tensor.kind.block, 1)
    starts = order[::block]
    format: WeightFormat | None = None
    entries: list[TensorEntry] = []
    if np.array_equal(order, (starts[:, None] + np.arange(block)).reshape(-1)):
        format, entries = _in_format(matrix)
    if format is None:
        entries, starts, block = [_in_floats(matrix)], order, 1
    return format, [replace(each, decode=_Columns(each, starts // block)) for each in entries]


class _Columns:
    """Reads a matrix with its columns, or equal runs of them, in another order."""

    def __init__(self, entry: TensorEntry, order: np.ndarray):
        self._entry, self._order = entry, order

    def __call__(self, data: np.ndarray) -> np.ndarray:
        entry = self._entry
        array = entry.decode(data) if entry.decode else _plain(entry.dtype.size, entry.shape, data)
        runs = array.reshape(len(array), len(self._order), -1)[:, self._order]
        return np.ascontiguousarray(runs).reshape(array.shape)


def _rows_by_halves(tensor: StoredTensor, heads: Any) -> np.ndarray:
    """The stored row of each row of the Hub's matrix, whose heads have one half after the other."""
    rows = tensor.shape[0]
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise CheckpointError(
            f"[GGUF] tensor {tensor.name!r:.100} must have an even number of rows for each of "
            f"{heads!r:.40} heads but has {rows}. Fetch the file again."
        )
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


def _plain(size: int, shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
    return data.view(f"<u{size}").reshape(shape)


def _check_link(file: Path) -> None:
    """Refuses a file of a folder that is a link out of it. A file that the user named may be one."""
    try:
        check_link(file)
    except OSError as error:
        raise CheckpointError(f"[GGUF] '{file}' cannot be read: {error}. {UNREADABLE}") from error


def _tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    if folder is None or not any((folder / name).exists() for name in VOCABULARY_FILES):
        return {}
    return {
        name: read_limited(file, MAX_VOCABULARY_BYTES)
        for name, file in tokenizer_files(folder).items()
    }


@cache
def _own_folder(file: Path) -> Path:
    return new_scratch_folder()


def _folder(file: Path, config: Mapping[str, Any], files: Mapping[str, bytes]) -> Path:
    """A folder of this process with the small files of a checkpoint."""
    folder = _own_folder(file.resolve())
    show_as(str(folder), str(file))
    with writing("GGUF", folder):
        for old in tokenizer_files(folder).values():
            old.unlink()
        for name, content in {**files, "config.json": json_text(config).encode()}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    return folder
