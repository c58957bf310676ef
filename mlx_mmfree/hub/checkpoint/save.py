"""Writes a model as a checkpoint folder, which appears only when it is complete."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError
from ...files.checkpoint_files import CONFIG_FILE, GENERATION_FILE, tokenizer_files
from ...files.json_file import write_json
from ...files.paths import real_path
from ...files.replacing import new_folder, writing
from ...files.safetensors_writer import METADATA, PlannedTensors, write_safetensors, write_shards
from ...layers.matrix import matrices, parameters, stored_layouts
from ...models import EncoderDecoder, TokenModel, architecture_of
from ...models.parts.encoder_decoder import SEARCH_KEYS
from ...ops.float_dtypes import FLOATS
from ...tokenizer.tokenizer import Tokenizer
from ...tokenizer.translation_tokenizer import TranslationTokenizer
from ..names import WeightNames
from .forms import affine_format
from .forms.packed_format import WRITER_KEY, describe_packing
from .target_folder import check_target, copy_files, token_ids
from .writer_record import record


def save_model(
    path: str | os.PathLike[str],
    model: TokenModel,
    tokenizer: Tokenizer | TranslationTokenizer | str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a model as a checkpoint folder that `load` reads back without loss.

    Packed linears are written packed (see `forms.packed_format`), and float ones as they are. Names and
    `config.json` are those of the Hub. The folder appears under its name only when it is complete.

    Args:
        path: The folder to make.
        model: A model of a known architecture.
        tokenizer: A loaded tokenizer or a folder, whose files are copied; `None` copies none.
        overwrite: Replace an existing checkpoint folder.

    Raises:
        CheckpointError: The folder exists, the disk is full, or the model cannot be described.

    Example:
        >>> from mlx_mmfree import demo
        >>> model, tokenizer = load(demo.path())
        >>> save_model("my-model", model, tokenizer)
        >>> load("my-model")[0].dims == model.dims
        True
    """
    target = real_path(path)
    if isinstance(tokenizer, Tokenizer | TranslationTokenizer):
        tokenizer = tokenizer.folder
    source = None if tokenizer is None else Path(tokenizer)
    check_target(target, overwrite, "save_model", [source])
    copied = _tokenizer_files(source)
    tensors = disk_tensors(model)
    config = {**token_ids(copied.pop(CONFIG_FILE, None)), **describe_model(model)}
    needed = sum(array.nbytes for array in tensors.values())
    needed += sum(file.stat().st_size for file in copied.values())
    made = new_folder(target, replaces=overwrite, needed_bytes=needed)
    with writing("save_model", target), made as folder:
        write_json(folder / CONFIG_FILE, config)
        write_shards(folder, [PlannedTensors.of(*item) for item in tensors.items()])
        copy_files(copied, folder)
        if GENERATION_FILE not in copied and (searched := _searched(model)):
            write_json(folder / GENERATION_FILE, searched)


def disk_tensors(model: TokenModel) -> dict[str, mx.array]:
    """The parameters of a model by their names on disk."""
    architecture = architecture_of(model.config)
    names = WeightNames(architecture.weight_names)
    layouts = stored_layouts(model)
    tensors: dict[str, mx.array] = {}
    for name, array in parameters(model).items():
        if name in layouts and array.dtype in FLOATS:
            array = layouts[name].write(array)
        try:
            tensors[names.to_disk(name)] = array
        except KeyError as error:
            raise CheckpointError(
                f"[save_model] parameter '{name}' has no name on the Hub for this architecture. "
                "Fuse or remove what was added to the model."
            ) from error
    return tensors


def write_tensors(
    file: Path, tensors: dict[str, mx.array], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file to the disk."""
    plan = [PlannedTensors.of(*item) for item in tensors.items()]
    write_safetensors(file, plan, {**METADATA, **(metadata or {})})


def describe_model(model: TokenModel) -> dict[str, Any]:
    """The content of `config.json` for a model, without the ids of special tokens."""
    config: dict[str, Any] = {**model.config.to_hub(), WRITER_KEY: record(model.rounding)}
    if isinstance(model, EncoderDecoder):
        searched = model.search_files.config
        config |= {key: searched[key] for key in SEARCH_KEYS & searched.keys()}
    packed = [matrix for matrix in matrices(model).values() if matrix.storage == "trits"]
    if packed:
        described = config.get("quantization_config")
        is_dense = not any(matrix.is_ternary for matrix in packed)
        config["quantization_config"] = describe_packing(described, is_dense=is_dense)
    names = WeightNames(architecture_of(model.config).weight_names)
    quantization = affine_format.describe(model, names)
    if quantization is not None:
        config["quantization"] = quantization
    return config


def _tokenizer_files(source: Path | None) -> dict[str, Path]:
    if source is None:
        return {}
    if not source.is_dir():
        raise CheckpointError(
            f"[save_model] 'tokenizer' must be a folder with tokenizer files but '{source}' is not a "
            "folder. Give the folder of the checkpoint, or the loaded tokenizer."
        )
    return tokenizer_files(source)


def _searched(model: TokenModel) -> dict[str, Any]:
    """What the `generation_config.json` of an encoder-decoder said."""
    return dict(model.search_files.generation) if isinstance(model, EncoderDecoder) else {}
