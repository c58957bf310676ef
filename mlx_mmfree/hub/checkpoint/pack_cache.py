"""Keeps the packed format of 16- and 32-bit checkpoints, so that each is ternarised only once.

The cache has one file for each checkpoint, in `$HF_HOME/mlx_mmfree` or in the folder that the variable
`MLX_MMFREE_CACHE` names. `MLX_MMFREE_CACHE=0` turns it off. A file is used only for the source that it
was made from, with the same sizes and modification times. Each tensor is compared with its checksum as
it is read. The files can be deleted at any time.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.checkpoint_files import CONFIG_FILE
from ...files.reading import parse_json, read_json_object
from ...files.tensors import checksum, read_header, tensor_bytes
from ...files.writing import new_file
from ...layers.matrix import fixed_dtype_names
from ...models import Decoder
from ...ops.ternary import ROUNDING_VERSION
from ...platform.cache_folder import ENVIRONMENT_VARIABLE, cache_folder
from ...version import __version__
from .checkpoint import Checkpoint, notify
from .save import described_matrices, disk_tensors, write_tensors
from .weight_format import weight_formats


@dataclass(frozen=True)
class CachedModel:
    """A model in the caches.

    Attributes:
        name: The repository of the Hub. For a packed format without one, its file name without the
            suffix.
        family: The `model_type` of its configuration, or of an image model the `architecture`;
            `None` if there is no configuration to read.
        nbytes: The bytes in the Hub's cache; 0 for a packed format alone.
        packed_bytes: The bytes of its packed formats.
        last_used: When it was last read or written, in seconds since 1970.
        paths: What its removal deletes.
    """

    name: str
    family: str | None
    nbytes: int
    packed_bytes: int
    last_used: float
    paths: tuple[Path, ...]


def cached_models() -> list[CachedModel]:
    """All models in the caches. The one that was used last comes first."""
    packed = _packed_files()
    models = list(_repositories(packed))
    for file, stat in packed.items():
        used = max(stat.st_atime, stat.st_mtime)
        models.append(CachedModel(file.stem, None, 0, stat.st_size, used, (file,)))
    return sorted(models, key=lambda model: -model.last_used)


def remove_model(model: CachedModel) -> None:
    """Deletes a model from the caches, and nothing outside them.

    Raises:
        CheckpointError: Something to delete is a link, lies outside the caches or cannot be deleted.
    """
    for path in model.paths:
        roots = [root.resolve() for root in (_hub_cache(), cache_folder()) if root is not None]
        if path.is_symlink() or path.resolve().parent not in roots:
            raise CheckpointError(
                f"[models] '{model.name}' must lie in the caches but '{path}' does not, or is a link. "
                "Remove it by hand."
            )
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise CheckpointError(
                f"[models] '{path}' cannot be removed: {error}. Check its permissions, or do it by hand."
            ) from error


def _repositories(packed: dict[Path, os.stat_result]) -> Iterator[CachedModel]:
    """Yields the models of the Hub's cache, and takes their packed formats out of `packed`."""
    # slow to import
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir(_hub_cache()).repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type != "model":
            continue
        snapshots = [revision.snapshot_path for revision in repository.revisions]
        formats = {packed_file(snapshot) for snapshot in snapshots} & packed.keys()
        own = {file: packed.pop(file) for file in sorted(filter(None, formats))}
        yield CachedModel(
            repository.repo_id,
            _family(snapshots),
            repository.size_on_disk,
            sum(stat.st_size for stat in own.values()),
            repository.last_accessed,
            (repository.repo_path, *own),
        )


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _packed_files() -> dict[Path, os.stat_result]:
    """The files of packed formats. One that another process removes at this moment is left out."""
    folder = cache_folder()
    found: dict[Path, os.stat_result] = {}
    if folder is None or not folder.is_dir():
        return found
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    found[Path(entry)] = entry.stat(follow_symlinks=False)
    return found


def _family(snapshots: Sequence[Path]) -> str | None:
    for snapshot in snapshots:
        try:
            config = read_json_object(snapshot / CONFIG_FILE)
        except CheckpointError:
            continue
        family = config.get("model_type", config.get("architecture"))
        if isinstance(family, str):
            return family
    return None


MIN_SOURCE_BYTES = 64_000_000
"""Smaller checkpoints are packed quickly and are not cached."""

SUFFIX = ".safetensors"
_SOURCE, _CHECKSUMS, _VERSION = "mmfree_source", "mmfree_sha256", "mmfree_version"
_FORMATS = "mmfree_forms"
"""The matrices as `config.json` would describe them."""


class PackCache:
    """The packed format of a checkpoint in the cache.

    Args:
        checkpoint: The checkpoint, which is not packed itself.
    """

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        has_own_files = all(
            entry.file.parent == checkpoint.folder for entry in checkpoint.tensors.values()
        )
        is_large = checkpoint.nbytes >= MIN_SOURCE_BYTES
        self._file = packed_file(checkpoint.folder) if is_large and has_own_files else None

    def find(self) -> Checkpoint | None:
        """The packed format; `None` if no valid one is cached."""
        if self._file is None or not self._file.exists():
            return None
        try:
            entries, metadata = read_header(self._file)
            if metadata.get(_SOURCE) != _fingerprint(self._checkpoint):
                return None
            checksums, formats = (
                parse_json(metadata[key].encode()) for key in (_CHECKSUMS, _FORMATS)
            )
            tensors = {
                name: replace(entry, checksum=str(checksums[name]))
                for name, entry in entries.items()
            }
        except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
            self.notify_damage(CheckpointError(f"'{self._file}' is damaged ({error})"))
            return None
        return Checkpoint(self._checkpoint.folder, {**self._checkpoint.config, **formats}, tensors)

    def store(self, model: Decoder) -> None:
        """Writes the packed format unless the cache is off or the disk is full."""
        file = self._file
        if file is None or not fixed_dtype_names(model):
            return
        tensors = disk_tensors(model)
        nbytes = sum(array.nbytes for array in tensors.values())
        checksums = {name: checksum(tensor_bytes(array)) for name, array in tensors.items()}
        try:
            with new_file(file, nbytes) as new:
                metadata = {
                    _SOURCE: _fingerprint(self._checkpoint),
                    _VERSION: __version__,
                    _CHECKSUMS: json.dumps(checksums),
                    _FORMATS: json.dumps(described_matrices(model, self._checkpoint.config)),
                }
                write_tensors(new, tensors, metadata)
        except (OSError, RuntimeError, CheckpointError) as error:
            notify(f"the packed format is not kept in '{file.parent}': {error}")
        else:
            notify(
                f"the packed format ({nbytes / 1e6:.0f} MB) is kept in '{file}' for the "
                f"next start; {ENVIRONMENT_VARIABLE}=0 turns this off"
            )

    @staticmethod
    def notify_damage(error: Exception) -> None:
        """Prints that the packed format cannot be used."""
        notify(f"the cached packed format is made again: {error}")


def packed_file(folder: Path) -> Path | None:
    """The file for the packed format of a checkpoint folder; `None` if the cache is off."""
    cache = cache_folder()
    if cache is None:
        return None
    source = folder.resolve()
    key = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
    return cache / f"{_readable_name(source)}-{key}{SUFFIX}"


def _readable_name(source: Path) -> str:
    # a snapshot of the Hub's cache lies in models--owner--name/snapshots/<commit>
    is_snapshot = source.parent.name == "snapshots"
    name = source.parent.parent.name.removeprefix("models--") if is_snapshot else source.name
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:80]


def _fingerprint(checkpoint: Checkpoint) -> str:
    files = sorted({entry.file for entry in checkpoint.tensors.values()})
    stats = [(file, file.stat()) for file in files]
    usual = next(format for format in weight_formats().values() if format.is_usual)
    value: Mapping[str, Any] = {
        "format": [usual.own["format_version"], _FORMATS],
        "rounding": ROUNDING_VERSION,
        "config": checkpoint.config,
        # a snapshot of the Hub links to a file that is named after its etag
        "files": [
            [file.name, file.resolve().name, stat.st_size, stat.st_mtime_ns] for file, stat in stats
        ],
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
