"""The activations between layers, which stay in files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...files.reading import open_file
from ...files.stored_array import StoredArray
from ...files.tensors import tensor_bytes
from ...files.writing import new_file

_WORDS: Mapping[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


@dataclass(frozen=True)
class Stream:
    """The residual stream of all samples before one layer of a model, in a file.

    The file appears under its name only when it is complete.

    Attributes:
        file: The file.
        shape: The numbers of samples, of tokens and of dims.
        dtype: The dtype of its numbers.
    """

    file: Path
    shape: tuple[int, int, int]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.size

    def write(self, batches: Iterable[mx.array]) -> None:
        """Writes batches of samples, one after the other.

        Raises:
            OSError: The folder cannot be written, or the disk is too full.
        """
        with new_file(self.file, self.nbytes) as new, new.open("wb") as stream:
            for batch in batches:
                stream.write(tensor_bytes(batch.astype(self.dtype)).data)

    def open(self) -> "OpenStream":
        """The samples, to be read.

        Raises:
            TrainingError: The file is damaged.
        """
        return OpenStream(self)


class OpenStream:
    """The samples of a stream that was written.

    Args:
        stream: The stream.

    Raises:
        TrainingError: The file is damaged.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        try:
            with open_file(stream.file) as file:
                self._rows = StoredArray(
                    file, _WORDS[stream.dtype.size], stream.shape, 0, _refuse, self._damaged
                )
            if stream.file.stat().st_size != stream.nbytes:
                raise ValueError(f"it must have {stream.nbytes:,} bytes")
        except (OSError, ValueError) as error:
            raise self._damaged(str(error)) from error

    def __len__(self) -> int:
        return self._stream.shape[0]

    def __getitem__(self, rows: slice) -> mx.array:
        return mx.array(self._rows[rows]).view(self._stream.dtype)

    def at(self, rows: Sequence[int]) -> mx.array:
        """The samples with these numbers."""
        return mx.concatenate([self[slice(row, row + 1)] for row in rows])

    def _damaged(self, why: str) -> TrainingError:
        return TrainingError(
            f"[calibrate] '{self._stream.file}' must be what this run wrote but {why}. Remove "
            f"the folder '{self._stream.file.parent}' to start over."
        )


def _refuse(stream: BufferedReader) -> None:
    raise ValueError("it was changed while it was read")
