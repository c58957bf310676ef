"""Arrays that stay in their file, of which rows are read when they are asked for.

A mapped file would end the process without a word where it has become shorter.
"""

import os
import weakref
from collections.abc import Callable
from io import BufferedReader
from typing import Any, cast

import numpy as np


class StoredArray:
    """Rows of numbers in an open file.

    Args:
        stream: The file. It may be closed afterwards.
        dtype: What is stored.
        shape: Of the whole array, whose rows follow one another.
        start: Offset of the first byte.
        check_again: Called with the file where it was written to since it was opened. It raises
            `ValueError` unless the content is still the same.
        problem: Makes an error of the reason why rows cannot be read any more.
    """

    def __init__(
        self,
        stream: BufferedReader,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        start: int,
        check_again: Callable[[BufferedReader], None],
        problem: Callable[[str], Exception],
    ):
        self.dtype, self.shape = dtype, shape
        self._file = os.dup(stream.fileno())
        weakref.finalize(self, os.close, self._file)
        self._start = start
        self._check_again, self._problem = check_again, problem
        self._state = self._current_state()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Some rows, as an array of their own; raises what `problem` makes."""
        first, stop, _ = rows.indices(len(self))
        array = np.empty((max(stop - first, 0), *self.shape[1:]), self.dtype)
        row_bytes = array.nbytes // len(array) if len(array) else 0
        memory = memoryview(cast(Any, array.reshape(-1).view(np.uint8)))
        try:
            while not self._fill(memory, self._start + first * row_bytes):
                state = self._current_state()
                with self._stream() as stream:
                    self._check_again(stream)
                self._state = state
        except (OSError, ValueError) as error:
            raise self._problem(str(error)) from error
        return array

    def first(self, count: int) -> "StoredArray":
        """The first rows, or all if there are fewer; they are not read either."""
        shape = (min(count, len(self)), *self.shape[1:])
        with self._stream() as stream:
            return StoredArray(
                stream, self.dtype, shape, self._start, self._check_again, self._problem
            )

    def _stream(self) -> BufferedReader:
        return os.fdopen(os.dup(self._file), "rb")

    def _fill(self, memory: memoryview, offset: int) -> bool:
        """Reads some bytes, and returns whether they belong to the file that was opened."""
        done = 0
        while done < len(memory):
            part = os.pread(self._file, len(memory) - done, offset + done)
            if not part:
                break
            memory[done : done + len(part)] = part
            done += len(part)
        return done == len(memory) and self._current_state() == self._state

    def _current_state(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns
