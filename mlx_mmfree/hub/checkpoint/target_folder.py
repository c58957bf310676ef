"""Checks a folder that is to be written, and copies the small files of a checkpoint into it."""

import fnmatch
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.checkpoint_files import (
    CONFIG_FILE,
    GGUF_SUFFIX,
    INDEX_FILE,
    SCALES_FILE,
    TEMPLATES_FOLDER,
    TOKENIZER_PATTERNS,
    TORCH_INDEX_FILE,
)
from ...files.json_file import read_json_object
from ...files.opening import open_member

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CHECKPOINT_FILES = (
    *TOKENIZER_PATTERNS,
    "model*.safetensors",
    INDEX_FILE,
    SCALES_FILE,
    "pytorch_model*.bin",
    TORCH_INDEX_FILE,
    f"*{GGUF_SUFFIX}",
    "hgrn_bit.py",
    "hybrid.py",
    "ternary_transformer.py",
    "adapters.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
    "step.mlxfn",
    "step.json",
    "weights.safetensors",
    "merges.txt",
    "vocab.json",
    "README.md",
    "LICEN[CS]E*",
    "NOTICE*",
    ".DS_Store",
    ".gitattributes",
)
"""Files of this library, mlx-lm, transformers and PEFT. Any other file may be the user's own."""


def check_target(
    target: Path, overwrite: bool, place: str, sources: Iterable[Path | None] = ()
) -> None:
    """Refuses a folder that must not be replaced.

    Args:
        target: The folder to make.
        overwrite: Whether an existing checkpoint folder may be replaced.
        place: The command or function that reports it.
        sources: The folders and files that it is made of.

    Raises:
        CheckpointError: The target is a file, a folder with other files, or not apart from a source.
    """
    check_apart(target, sources, place)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise CheckpointError(
            f"[{place}] 'path' must be a folder but '{target}' is a file. Choose another name."
        )
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
    if foreign := sorted(entry.name for entry in target.iterdir() if not _is_replaceable(entry)):
        raise CheckpointError(
            f"[{place}] 'path' must hold nothing but a checkpoint to be replaced but '{target}' also "
            f"has {', '.join(map(repr, foreign[:5]))}. Move it elsewhere, or choose another folder."
        )


def check_apart(target: Path, sources: Iterable[Path | None], place: str) -> None:
    """Refuses a folder that is a source of what is written to it, lies in one, or holds one.

    Raises:
        CheckpointError: The folder and a source are not apart, however their paths are written.
    """
    for source in sources:
        if source is None or not source.exists():
            continue
        if _contains(target, source):
            raise CheckpointError(
                f"[{place}] 'path' must not be or hold what is read, '{source}', but got '{target}'. "
                "Choose another folder."
            )
        if source.is_dir() and _contains(source, target):
            raise CheckpointError(
                f"[{place}] 'path' must lie outside of what is read, '{source}', but got '{target}'. "
                "Choose another folder."
            )


def _contains(folder: Path, path: Path) -> bool:
    """Whether a folder is a path or lies above it, also through links and on disks that ignore case."""
    real = Path(os.path.realpath(path))
    return folder.exists() and any(
        parent.exists() and os.path.samefile(parent, folder) for parent in (real, *real.parents)
    )


def _is_replaceable(entry: Path) -> bool:
    if entry.name == TEMPLATES_FOLDER and entry.is_dir() and not entry.is_symlink():
        return all(file.suffix == ".jinja" and not file.is_dir() for file in entry.iterdir())
    return not entry.is_dir() and any(
        fnmatch.fnmatchcase(entry.name, pattern) for pattern in CHECKPOINT_FILES
    )


def token_ids(source: Path | None) -> dict[str, Any]:
    """The ids of special tokens that a `config.json` names."""
    config = {} if source is None else read_json_object(source)
    return {key: config[key] for key in _TOKEN_IDS if key in config}


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Copies files of a checkpoint to their paths in another folder.

    Raises:
        OSError: A file cannot be read or written, or is a link out of its own folder.
    """
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with open_member(file) as source, open(folder / name, "xb") as copy:
            shutil.copyfileobj(source, copy)
