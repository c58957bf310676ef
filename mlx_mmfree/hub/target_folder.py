"""A new folder or file that appears under its name only when it is complete."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checkpoint import CONFIG_FILE
from .download import GGUF_SUFFIX, TOKENIZER_PATTERNS
from .json_file import read_json_object

_SPARE_BYTES = 16_000_000
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_target(target: Path, overwrite: bool, place: str) -> None:
    """Refuses a folder that must not be replaced.

    Args:
        target: The folder to make.
        overwrite: Whether an existing checkpoint folder may be replaced.
        place: What reports it.

    Raises:
        CheckpointError: It is a file, or a folder with files of its own.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise CheckpointError(f"[{place}] 'path' must be a folder but '{target}' is a file.")
    if not overwrite:
        raise CheckpointError(
            f"[{place}] 'path' must be a new or empty folder but '{target}' has files. Pass "
            "overwrite=True (--overwrite) to replace it."
        )
    if not (target / CONFIG_FILE).is_file() and not any(target.glob(f"*{GGUF_SUFFIX}")):
        raise CheckpointError(
            f"[{place}] 'path' must be a checkpoint folder to be replaced but '{target}' has no "
            f"{CONFIG_FILE} and no {GGUF_SUFFIX} file. Choose another folder."
        )


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


def write_json(file: Path, value: Any) -> None:
    """Writes JSON with sorted keys."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(file)


def tokenizer_files(source: Path) -> dict[str, Path]:
    """The files beside the weights, `config.json` among them, by name."""
    return {name: source / name for name in TOKENIZER_PATTERNS if (source / name).is_file()}


def token_ids(source: Path | None) -> dict[str, Any]:
    """The ids of special tokens that a `config.json` names."""
    config = {} if source is None else read_json_object(source)
    return {key: config[key] for key in _TOKEN_IDS if key in config}


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Copies files into a folder under their names."""
    for name, file in files.items():
        shutil.copyfile(file, folder / name)
        sync(folder / name)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
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
