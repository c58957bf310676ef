"""Lists and removes the models in the caches of this machine, the Hub's and that of packed forms."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...files.checkpoint_files import CONFIG_FILE
from ...files.json_file import read_json_object
from ...platform.cache_folder import cache_folder
from .pack_cache import SUFFIX, packed_file


@dataclass(frozen=True)
class CachedModel:
    """A model in the caches.

    Attributes:
        name: The repository of the Hub. For a packed form without one, its file name without the suffix.
        family: The `model_type` of its configuration, or of a model of images the `architecture`;
            `None` if there is no configuration to read.
        nbytes: The bytes in the Hub's cache; 0 for a packed form alone.
        packed_bytes: The bytes of its packed forms.
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
    """Yields the models of the Hub's cache, and takes their packed forms out of `packed`."""
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
        forms = {packed_file(snapshot) for snapshot in snapshots} & packed.keys()
        own = {file: packed.pop(file) for file in sorted(filter(None, forms))}
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
    """The files of packed forms. One that another process removes at this moment is left out."""
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
