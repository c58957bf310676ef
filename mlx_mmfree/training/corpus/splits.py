"""The files of a folder of data by the splits that they hold: training, validation and test."""

import re
from collections.abc import Sequence
from pathlib import Path

from ...errors import TrainingError
from ...files.reading import visible
from ...hub.remote.datasets import SPLITS, fetch_splits
from .documents import COMPRESSED
from .rows import KINDS, TEXTS

FORMATS = tuple(tuple(kind + packed for packed in ("", *COMPRESSED)) for kind in (*KINDS, *TEXTS))
"""The kinds of files of samples, each with its suffixes."""

_SUFFIXES = tuple(suffix for format in FORMATS for suffix in format)


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder by their splits `train`, `valid` and `test`.

    A split has one file of rows, such as `train.csv`. In a folder of texts alone, each file is a text,
    in the order of the names: `valid.txt`, `valid-1.md` and the like are for validation, those with
    `test` for the test, and all others for training.

    Raises:
        TrainingError: There is no such folder, or a split has several files of rows.
    """
    if not folder.is_dir():
        raise TrainingError(
            f"[data] 'data' must be a folder with train, valid or test as {', '.join(KINDS)}, or a "
            f"dataset of the Hub, but '{folder}' is neither."
        )
    found = _rows_in(folder, _SUFFIXES)
    texts = [file for suffix in TEXTS for file in visible(folder, f"*{suffix}")]
    if all(file in texts for files in found.values() for file in files):
        split_of = {file: _split_of(file) for file in sorted(texts)}
        found_texts = {
            split: [file for file in split_of if split_of[file] == split] for split in SPLITS
        }
        return {split: files for split, files in found_texts.items() if files}
    return found


def dataset_splits(name: str) -> dict[str, list[Path]]:
    """The files of a dataset of the Hub by their splits, as of `find_splits`, in the first format it
    has.

    Raises:
        CheckpointError: It cannot be the name of a dataset.
        DownloadError: The Hub does not hand out the dataset, or it has no such files.
        TrainingError: A split has several files.
    """
    return _rows_in(*fetch_splits(name, FORMATS))


def _rows_in(folder: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    found = {split: find_split(folder, split, suffixes) for split in SPLITS}
    return {split: [file] for split, file in found.items() if file is not None}


def _split_of(text: Path) -> str:
    for split, names in SPLITS.items():
        if re.fullmatch(rf"({'|'.join(names)})([-_.]?\d+)?", text.stem.lower()):
            return split
    return "train"


def find_split(folder: Path, split: str, kinds: Sequence[str]) -> Path | None:
    """The one that a folder has of the files of a split.

    Args:
        folder: The folder.
        split: One of `SPLITS`.
        kinds: The suffixes to look for. An empty one means a folder.

    Raises:
        TrainingError: There are several.
    """
    paths = [(folder / f"{name}{kind}", kind) for name in SPLITS[split] for kind in kinds]
    found = [path for path, kind in paths if (path.is_file() if kind else path.is_dir())]
    if len(found) > 1:
        raise TrainingError(
            f"[data] '{folder}' must hold one file for {split} but holds "
            f"{' and '.join(repr(path.name) for path in found)}. Move one of them elsewhere."
        )
    return found[0] if found else None
