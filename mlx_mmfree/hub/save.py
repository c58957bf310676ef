"""Writes a model as a checkpoint folder, whole or not at all."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from ..layers import PackedBitLinear, PackedLinear
from ..models import Decoder, find
from . import affine_format
from .checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from .download import TOKENIZER_PATTERNS
from .json_file import read_json_object
from .names import WeightNames
from .packed_format import describe_packing
from .safetensors import read_header
from .skeleton import parameters
from .tokenizer import Tokenizer

MAX_SHARD_BYTES = 5 * 10**9
_SPARE_BYTES = 16_000_000
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_model(
    path: str | os.PathLike[str],
    model: Decoder,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a model as a checkpoint folder that `load` reads back without loss.

    Packed linears are written packed (see `hub.packed_format`), float ones as they are; names and
    `config.json` are the Hub's. The folder appears under its name only when it is complete.

    Args:
        path: The folder to make.
        model: A model of a known architecture.
        tokenizer: A loaded tokenizer, or a folder, whose files are copied; `None` writes none.
        overwrite: Replace an existing checkpoint folder.

    Raises:
        CheckpointError: The folder exists, the disk is full, or the model cannot be described.

    Example:
        >>> save_model("my-model", model, tokenizer)  # doctest: +SKIP
    """
    target = Path(path).expanduser().resolve()
    _check_target(target, overwrite)
    source = tokenizer.folder if isinstance(tokenizer, Tokenizer) else tokenizer
    copied = _tokenizer_files(None if source is None else Path(source))
    tensors = disk_tensors(model)
    config = _config(model, copied)
    needed = sum(array.nbytes for array in tensors.values())
    needed += sum(file.stat().st_size for file in copied.values())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, needed)
        with _replacing_folder(target) as folder:
            _write_json(folder / CONFIG_FILE, config)
            _write_shards(folder, tensors)
            for name, file in copied.items():
                shutil.copyfile(file, folder / name)
                sync(folder / name)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"[save_model] '{target}' cannot be written: {error}.") from error


def disk_tensors(model: Decoder) -> dict[str, mx.array]:
    """The parameters of a model by their names on disk."""
    architecture = find(model.config.to_hub()["model_type"])
    names = WeightNames(architecture.WEIGHT_NAMES)
    tensors: dict[str, mx.array] = {}
    for name, array in parameters(model).items():
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
    """Writes one safetensors file to the disk and reads its header back."""
    mx.save_safetensors(str(file), tensors, {"format": "mlx", **(metadata or {})})
    if len(read_header(file)[0]) != len(tensors):
        raise OSError(f"'{file}' was not written completely")
    sync(file)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises `OSError` if the disk that holds `folder` has too little room."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise OSError(f"{needed_bytes / 1e6:.0f} MB are needed but {free / 1e6:.0f} MB are free")


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise CheckpointError(f"[save_model] 'path' must be a folder but '{target}' is a file.")
    if not overwrite:
        raise CheckpointError(
            f"[save_model] 'path' must be a new or empty folder but '{target}' has files. Pass "
            "overwrite=True to replace it."
        )
    if not (target / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"[save_model] 'path' must be a checkpoint folder to be replaced but '{target}' has no "
            f"{CONFIG_FILE}. Choose another folder."
        )


def _tokenizer_files(source: Path | None) -> dict[str, Path]:
    if source is None:
        return {}
    if not source.is_dir():
        raise CheckpointError(
            f"[save_model] 'tokenizer' must be a folder with tokenizer files but got '{source}'."
        )
    return {name: source / name for name in TOKENIZER_PATTERNS if (source / name).is_file()}


def _config(model: Decoder, copied: dict[str, Path]) -> dict[str, Any]:
    """`config.json` of the model, with the token ids of the copied one, which it replaces."""
    source = copied.pop(CONFIG_FILE, None)
    ids = {} if source is None else read_json_object(source)
    config: dict[str, Any] = {key: ids[key] for key in _TOKEN_IDS if key in ids}
    config |= model.config.to_hub()
    kinds = {type(module) for module in model.modules()}
    if kinds & {PackedBitLinear, PackedLinear}:
        described = config.get("quantization_config")
        is_dense = PackedBitLinear not in kinds
        config["quantization_config"] = describe_packing(described, is_dense=is_dense)
    names = WeightNames(find(config["model_type"]).WEIGHT_NAMES)
    quantization = affine_format.describe(model, names)
    if quantization is not None:
        config["quantization"] = quantization
    return config


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(file)


def _write_shards(folder: Path, tensors: dict[str, mx.array]) -> None:
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name, array in tensors.items():
        if shards[-1] and size + array.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS_FILE, shards[0])
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        places.update(dict.fromkeys(shard, file))
    total = sum(array.nbytes for array in tensors.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})


@contextmanager
def _replacing_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place at the end, or vanishes on any error."""
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    new, old = (target.with_name(f".{target.name}.{kind}-{mark}") for kind in ("new", "old"))
    new.mkdir()
    try:
        yield new
        sync(new)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
