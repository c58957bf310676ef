"""A checkpoint on disk: its configuration and where its tensors lie. Nothing is loaded here."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import safetensors, torch_checkpoint
from .download import TORCH_PATTERNS, local_folder
from .json_file import read_json_object
from .latent import with_latent
from .tensor_entry import TensorEntry

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_WEIGHT_FILES = (
    (WEIGHTS_FILE, INDEX_FILE),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose configuration and tensor headers were read.

    Attributes:
        folder: The local folder.
        config: The content of `config.json`.
        tensors: Every tensor by its name on disk.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(entry.nbytes for entry in self.tensors.values())


def open_checkpoint(
    path_or_repo: str | os.PathLike[str],
    revision: str | None = None,
    latent: bool | None = None,
) -> Checkpoint:
    """Finds or downloads a checkpoint and reads its headers.

    Args:
        path_or_repo: A folder, or a repository `owner/name` of the Hub.
        revision: Branch, tag or commit of the repository.
        latent: Whether float weights of a ternary Llama are masters to be ternarised (`True`) or
            meant as stored (`False`); `None` reads it from the configuration and the revision.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
        DownloadError: The Hub does not hand out the repository.
    """
    folder = local_folder(path_or_repo, revision)
    if not any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        folder = local_folder(path_or_repo, revision, patterns=TORCH_PATTERNS)
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(
            f"[load] '{folder}' must hold a checkpoint but has no {CONFIG_FILE}. Give the folder "
            "that holds it."
        )
    config, tensors = read_json_object(folder / CONFIG_FILE), read_tensor_entries(folder)
    dtypes = {entry.dtype for entry in tensors.values()}
    return Checkpoint(folder, with_latent(config, dtypes, revision, latent), tensors)


def read_tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint folder by name, from the headers of its files.

    Safetensors are preferred to PyTorch's files where there are both.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
    """
    for weights, index in _WEIGHT_FILES:
        if (folder / weights).exists():
            return _read_header(folder / weights)
        if (folder / index).exists():
            return _read_shards(folder / index, Path(weights).suffix)
    names = " or ".join(name for names in _WEIGHT_FILES for name in names)
    raise CheckpointError(f"[load] '{folder}' must hold {names} but has none of them.")


def _read_header(file: Path) -> dict[str, TensorEntry]:
    return (
        torch_checkpoint.read_header(file)
        if file.suffix == ".bin"
        else safetensors.read_header(file)[0]
    )


def _read_shards(index_file: Path, suffix: str) -> dict[str, TensorEntry]:
    folder = index_file.parent
    shards = read_json_object(index_file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(
            f"[load] '{index_file}' must map tensors to files in 'weight_map' but does not."
        )
    for shard in shards.values():
        if (
            not isinstance(shard, str)
            or not _SHARD_NAME.fullmatch(shard)
            or not shard.endswith(suffix)
        ):
            raise CheckpointError(
                f"[load] '{index_file}' must name {suffix} files of its own folder but got "
                f"{shard!r:.100}."
            )
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted(set(shards.values())):
        for name, entry in _read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"[load] '{folder}' must hold tensor {name!r:.100} once but both "
                    f"{tensors[name].file.name} and {shard} have it."
                )
            tensors[name] = entry
    for name, shard in shards.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"[load] '{folder / shard}' must hold tensor {name!r:.100}, as the index says, but "
                "does not. Fetch the checkpoint again."
            )
    return tensors
