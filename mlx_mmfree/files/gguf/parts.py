"""Models in several GGUF files, named `name-00001-of-00003.gguf` and so on as by llama.cpp.

The first part holds the metadata of the model. Each part says under `split.` which part it is, and how
many parts and tensors there are. A tensor may be in any part.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError
from .reader import StoredTensor, read_gguf

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII | re.DOTALL)
_MAX_PARTS = 1000


def part_name(stem: str, number: int, count: int) -> str:
    """The name of a part, counted from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that a file belongs to, in order."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= _MAX_PARTS:
        return [name]
    count = int(match[3])
    return [part_name(match[1], number, count) for number in range(1, count + 1)]


def whole_models(names: Iterable[str]) -> list[str]:
    """The models among some file names, each by the name of its first part."""
    return sorted({part_names(name)[0] for name in names})


def read_parts(file: Path) -> tuple[dict[str, Any], list[tuple[Path, StoredTensor]]]:
    """Reads and checks everything before the data of a model's files.

    Args:
        file: The file, or any one of the parts.

    Returns:
        The metadata, and each tensor with the file that holds it.

    Raises:
        CheckpointError: A part is missing, damaged or belongs to another model.
        UnsupportedModelError: As for `read_gguf`.
    """
    files = [file.with_name(name) for name in part_names(file.name)]
    metadata, stored = read_gguf(files[0])
    count = metadata.get(COUNT, 1)
    if count not in (0, 1) and count != len(files):
        raise CheckpointError(
            f"[GGUF] '{file}' must be named as one of the {count!r:.40} parts of its model, such as "
            f"'{part_name('model', 1, 3)}', but is not. Give all parts the names that they came with."
        )
    found = [(files[0], tensor) for tensor in stored.values()]
    for number, part in enumerate(files):
        if number:
            own, stored = read_gguf(part)
            found += [(part, tensor) for tensor in stored.values()]
        else:
            own = metadata
        if len(files) > 1 and (own.get(NUMBER), own.get(COUNT)) != (number, len(files)):
            raise CheckpointError(
                f"[GGUF] '{part}' must be part {number + 1} of {len(files)} but says in 'split.no' and "
                f"'split.count' {own.get(NUMBER)!r:.40} and {own.get(COUNT)!r:.40}. Fetch it again."
            )
    names = {tensor.name for _, tensor in found}
    total = metadata.get(TENSORS, len(found)) if len(files) > 1 else len(found)
    if len(names) != len(found) or total != len(found):
        raise CheckpointError(
            f"[GGUF] the {len(files)} parts of '{file}' must hold {total!r:.40} different tensors but "
            f"hold {len(names)} in {len(found)}. Fetch the parts again."
        )
    return metadata, found


def split_metadata(
    metadata: Mapping[str, Any], count: int, tensors: int
) -> Iterator[dict[str, Any]]:
    """Yields the metadata of each of `count` parts."""
    for number in range(count):
        own = {
            NUMBER: np.uint16(number),
            COUNT: np.uint16(count),
            TENSORS: np.int32(tensors),
        }
        yield {**(metadata if number == 0 else {}), **own}
