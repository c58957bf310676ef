"""A checkpoint on disk: its configuration and where its tensors are stored. Nothing is loaded here."""

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError
from ...files import safetensors
from ...files.checkpoint_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SCALES_FILE,
    TORCH_INDEX_FILE,
    TORCH_PATTERNS,
    TORCH_WEIGHTS_FILE,
    TORCH_WEIGHTS_PATTERN,
    WEIGHTS_FILE,
    WEIGHTS_PATTERN,
)
from ...files.json_file import read_json_object
from ...files.paths import visible
from ...files.tensor_entry import TensorEntry
from ...files.torch import checkpoint as torch_checkpoint
from ..remote.download import gguf_file, local_folder
from .forms.latent import with_latent
from .forms.packed_format import WRITER_KEY
from .gguf_checkpoint import read_gguf_checkpoint

RUN_MODEL = "model"
"""The folder of the model in the folder of a training run."""

_WEIGHT_FILES = (
    (WEIGHTS_FILE, INDEX_FILE, WEIGHTS_PATTERN),
    (TORCH_WEIGHTS_FILE, TORCH_INDEX_FILE, TORCH_WEIGHTS_PATTERN),
)
_COUNTED = re.compile(r".*-([0-9]{5})-of-([0-9]{5})\.\w+", re.ASCII | re.DOTALL)
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


ADAPTER_KEY = "adapter"
"""In the record of the writer."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose configuration and tensor headers were read.

    Attributes:
        folder: The local folder with the small files.
        config: The content of `config.json`.
        tensors: Every tensor by its name on the Hub.
        dtype: The float dtype to compute in; `None` keeps that of each tensor.

    Example:
        >>> from mlx_mmfree import demo
        >>> checkpoint = open_checkpoint(demo.path())
        >>> checkpoint.config["model_type"], len(checkpoint.tensors), checkpoint.nbytes
        ('hgrn_bit', 90, 5336164)
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    dtype: mx.Dtype | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors on disk."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def keeps_adapter(self) -> bool:
        """Whether an adapter lies beside the weights and belongs to the model.

        Raises:
            CheckpointError: The record of the writer says neither yes nor no.
        """
        described = self.config.get(WRITER_KEY)
        kept = described.get(ADAPTER_KEY, False) if isinstance(described, Mapping) else False
        if not isinstance(kept, bool):
            raise CheckpointError(
                f"[config.json] '{ADAPTER_KEY}' of '{WRITER_KEY}' must be true or false but got "
                f"{kept!r:.80}. Fetch the file again."
            )
        return kept

    def refuse_adapter(self, place: str, rule: str) -> None:
        """Refuses a model to which an adapter beside its weights belongs.

        Args:
            place: The command or function that reports it.
            rule: What only a model without one can be, for the message.

        Raises:
            CheckpointError: There is such an adapter.
        """
        if self.keeps_adapter:
            folder = shlex.quote(str(self.folder))
            raise CheckpointError(
                f"[{place}] '{self.folder}' must hold no adapter beside its base model {rule} but holds "
                f"one. Merge it first: mmfree fuse --model {folder} --form dense, or --form ternary "
                "with --data."
            )


def open_checkpoint(
    path_or_repo: str | os.PathLike[str],
    revision: str | None = None,
    latent: bool | None = None,
) -> Checkpoint:
    """Finds or downloads a checkpoint and reads its headers.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, or a file
            `owner/name/file.gguf` in one.
        revision: Branch, tag or commit of the repository.
        latent: Whether float weights of a ternary Llama are masters to be ternarised (`True`) or are
            meant as stored (`False`). `None` reads it from the configuration and the revision.

    Returns:
        The checkpoint, of whose tensors only the headers were read.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
        DownloadError: The Hub does not hand out the repository.
        UnsupportedModelError: The checkpoint asks for something that is not implemented.

    Example:
        >>> from mlx_mmfree import demo
        >>> sorted(open_checkpoint(demo.path()).tensors)[0]
        'lm_head.norm.weight'
    """
    folder = local_folder(path_or_repo, revision)
    if folder.is_file() or not has_weights(folder):
        file = gguf_file(folder, path_or_repo, revision)
        if file is not None:
            beside = folder if folder.is_dir() else None
            folder, config, tensors, dtype = read_gguf_checkpoint(file, beside)
            dtypes = {entry.dtype for entry in tensors.values()}
            config = with_latent(config, dtypes, revision, latent)
            return Checkpoint(folder, config, tensors, dtype)
    if not _holds(folder, _WEIGHT_FILES[0]):
        folder = local_folder(path_or_repo, revision, patterns=TORCH_PATTERNS)
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(
            f"[load] '{folder}' must hold a checkpoint but has no {CONFIG_FILE}. {_place(folder)}"
        )
    config, tensors = read_json_object(folder / CONFIG_FILE), read_tensor_entries(folder)
    tensors |= _read_scales(folder, tensors)
    dtypes = {entry.dtype for entry in tensors.values()}
    return Checkpoint(folder, with_latent(config, dtypes, revision, latent), tensors)


def _place(folder: Path) -> str:
    """Where the checkpoint may be that a folder does not hold, in words."""
    if (folder / RUN_MODEL / CONFIG_FILE).exists():
        return f"It is the folder of a run, whose model is '{folder / RUN_MODEL}'."
    return "Give the folder that holds it."


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights in safetensors or PyTorch's files."""
    return any(_holds(folder, files) for files in _WEIGHT_FILES)


def _holds(folder: Path, files: tuple[str, str, str]) -> bool:
    _, index, pattern = files
    return (folder / index).exists() or bool(visible(folder, pattern))


def read_tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint folder by their names, from the headers of its files.

    If there are safetensors and PyTorch's files, the safetensors are read. Without an index, all files
    are read that mlx-lm takes for weights.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
    """
    for weights, index, pattern in _WEIGHT_FILES:
        if (folder / weights).exists():
            return _read_header(folder / weights)
        if (folder / index).exists():
            return _read_shards(folder / index, Path(weights).suffix)
        if shards := visible(folder, pattern):
            _check_complete(folder, [shard.name for shard in shards])
            return _merged(shards)
    names = " or ".join(name for *names, _ in _WEIGHT_FILES for name in names)
    raise CheckpointError(
        f"[load] '{folder}' must hold {names} but has none of them. Give the folder that holds the "
        "weights, or fetch them again."
    )


def _read_header(file: Path) -> dict[str, TensorEntry]:
    return (
        torch_checkpoint.read_header(file)
        if file.suffix == ".bin"
        else safetensors.read_header(file)[0]
    )


def _read_scales(folder: Path, others: Collection[str]) -> dict[str, TensorEntry]:
    """The exact scales beside weights that were written for mlx-lm, see `forms.packed_format`."""
    file = folder / SCALES_FILE
    if not file.exists():
        return {}
    scales = safetensors.read_header(file)[0]
    for name in scales:
        if name in others or not name.endswith(".weight_scale"):
            raise CheckpointError(
                f"[load] '{file}' must hold nothing but scales of its own but has {name!r:.100}. "
                "Fetch or make the checkpoint again."
            )
    return scales


def _read_shards(index_file: Path, suffix: str) -> dict[str, TensorEntry]:
    folder = index_file.parent
    shards = read_json_object(index_file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(
            f"[load] '{index_file}' must map tensors to files in 'weight_map' but does not. Fetch the "
            "checkpoint again."
        )
    for shard in shards.values():
        if (
            not isinstance(shard, str)
            or not _SHARD_NAME.fullmatch(shard)
            or not shard.endswith(suffix)
        ):
            raise CheckpointError(
                f"[load] '{index_file}' must name {suffix} files of its own folder but got "
                f"{shard!r:.100}. Fetch the checkpoint again."
            )
    tensors = _merged([folder / shard for shard in sorted(set(shards.values()))])
    for name, shard in shards.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"[load] '{folder / shard}' must hold tensor {name!r:.100}, as the index says, but "
                "does not. Fetch the checkpoint again."
            )
    return tensors


def _merged(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """The tensors of all files."""
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"[load] '{file.parent}' must hold tensor {name!r:.100} once but both "
                    f"{tensors[name].file.name} and {file.name} have it. Fetch the checkpoint again."
                )
            tensors[name] = entry
    return tensors


def _check_complete(folder: Path, names: Sequence[str]) -> None:
    """Refuses files without an index some of which are absent, as their names tell."""
    counted = [found for name in names if (found := _COUNTED.fullmatch(name))]
    for count in {found[2] for found in counted}:
        numbers = {int(found[1]) for found in counted if found[2] == count}
        if absent := sorted(set(range(1, int(count) + 1)) - numbers):
            raise CheckpointError(
                f"[load] '{folder}' must hold all {int(count)} parts of the weights but lacks part "
                f"{absent[0]}, and there is no index. Fetch the checkpoint again."
            )
