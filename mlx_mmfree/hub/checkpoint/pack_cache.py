"""Keeps the packed form of 16- and 32-bit checkpoints, so that each is ternarised only once.

The cache has one file for each checkpoint, in `$HF_HOME/mlx_mmfree` or in the folder that the variable
`MLX_MMFREE_CACHE` names. `MLX_MMFREE_CACHE=0` turns it off. A file is used only for the source that it
was made from, with the same sizes and modification times. Each tensor is compared with its checksum as
it is read. The files can be deleted at any time.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...files.json_reader import parse_json
from ...files.replacing import new_file
from ...files.safetensors import read_header
from ...files.tensor_entry import checksum
from ...layers.matrix import kept_names
from ...models import Decoder
from ...ops.ternary import ROUNDING_VERSION
from ...platform.cache_folder import ENVIRONMENT_VARIABLE, cache_folder
from ...version import __version__
from .checkpoint import Checkpoint
from .forms.packed_format import FORMAT_VERSION, PACKED_DTYPES, describe_packing
from .notice import notify
from .save import disk_tensors, write_tensors

MIN_SOURCE_BYTES = 64_000_000
"""Smaller checkpoints are packed quickly and are not cached."""

SUFFIX = ".safetensors"
_SOURCE, _CHECKSUMS, _VERSION = "mmfree_source", "mmfree_sha256", "mmfree_version"


class PackCache:
    """The packed form of a checkpoint in the cache.

    Args:
        checkpoint: The checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        has_own_files = all(
            entry.file.parent == checkpoint.folder for entry in checkpoint.tensors.values()
        )
        is_large = checkpoint.nbytes >= MIN_SOURCE_BYTES
        self._file = packed_file(checkpoint.folder) if is_large and has_own_files else None

    def find(self) -> Checkpoint | None:
        """The packed form; `None` if no valid one is cached."""
        if self._file is None or not self._file.exists():
            return None
        try:
            entries, metadata = read_header(self._file)
            checksums = parse_json(metadata.get(_CHECKSUMS, "{}").encode())
            if metadata.get(_SOURCE) != _fingerprint(self._checkpoint):
                return None
            tensors = {
                name: replace(entry, checksum=str(checksums[name]))
                for name, entry in entries.items()
            }
        except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
            self.notify_damage(CheckpointError(f"'{self._file}' is damaged ({error})"))
            return None
        config = dict(self._checkpoint.config)
        if (described := config.get("quantization_config")) is not None:
            config["quantization_config"] = describe_packing(described)
        return Checkpoint(self._checkpoint.folder, config, tensors)

    def store(self, model: Decoder) -> None:
        """Writes the packed form unless the cache is off or the disk is full."""
        file = self._file
        dtypes = {entry.dtype for entry in self._checkpoint.tensors.values()}
        was_packed = any(dtype in PACKED_DTYPES for dtype in dtypes)
        if file is None or was_packed or not kept_names(model):
            return
        tensors = disk_tensors(model)
        nbytes = sum(array.nbytes for array in tensors.values())
        checksums = {name: _checksum(array) for name, array in tensors.items()}
        try:
            with new_file(file, nbytes) as new:
                metadata = {
                    _SOURCE: _fingerprint(self._checkpoint),
                    _VERSION: __version__,
                    _CHECKSUMS: json.dumps(checksums),
                }
                write_tensors(new, tensors, metadata)
        except (OSError, RuntimeError, CheckpointError) as error:
            notify(f"the packed form is not kept in '{file.parent}': {error}")
        else:
            notify(
                f"the packed form ({nbytes / 1e6:.0f} MB) is kept in '{file}' for the "
                f"next start; {ENVIRONMENT_VARIABLE}=0 turns this off"
            )

    @staticmethod
    def notify_damage(error: Exception) -> None:
        """Prints that the packed form cannot be used."""
        notify(f"the cached packed form is made again: {error}")


def packed_file(folder: Path) -> Path | None:
    """The file for the packed form of a checkpoint folder; `None` if the cache is off."""
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
    value: Mapping[str, Any] = {
        "format": FORMAT_VERSION,
        "rounding": ROUNDING_VERSION,
        "config": checkpoint.config,
        # a snapshot of the Hub links to a file that is named after its etag
        "files": [
            [file.name, file.resolve().name, stat.st_size, stat.st_mtime_ns] for file, stat in stats
        ],
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _checksum(array: mx.array) -> str:
    return checksum(np.asarray(array.reshape(-1).view(mx.uint8)))
