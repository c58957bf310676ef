"""A teacher's likeliest tokens on disk, for all places of a stage that runs without the teacher."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from ...errors import TrainingError
from ...files.reading import open_file
from ...files.stored_array import StoredArray
from ...files.writing import new_file
from ...models import Decoder
from ..batches import Batch
from ..loss import KnownBatch, batch_logits
from ..optimizer_step import Batches
from ..run_folder import writing


@dataclass(frozen=True)
class TeacherLogits:
    """The file of one stage.

    For each row of the data, in the order of the steps, and for each of its places it holds the `top_k`
    likeliest tokens, int32, and their logits less the largest, float16. The name tells the run that it
    belongs to, so that another run writes a file of its own. It appears only when it is complete.

    Args:
        folder: The folder of the stage.
        record: What the logits depend on, plain values.
        shape: The numbers of rows, places of a row, and tokens of a place.
    """

    folder: Path
    record: Mapping[str, Any]
    shape: tuple[int, int, int]

    @property
    def file(self) -> Path:
        text = json.dumps([self.record, self.shape], sort_keys=True)
        return self.folder / f"teacher-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"

    @property
    def _dtype(self) -> np.dtype[Any]:
        top_k = (self.shape[2],)
        return np.dtype([("tokens", np.int32, top_k), ("logits", np.float16, top_k)])

    def write(self, teacher: Decoder, batches: Batches, steps: int) -> None:
        """Writes the file, unless it is there.

        Args:
            teacher: The teacher.
            batches: The batches of each step.
            steps: Number of steps.

        Raises:
            TrainingError: The disk is full, or the folder cannot be written.
        """
        if self.file.exists():
            return
        teacher.eval()
        rows, places, _ = self.shape
        header = {"descr": self._dtype.descr, "fortran_order": False, "shape": (rows, places)}
        needed = rows * places * self._dtype.itemsize
        bar = tqdm(total=rows, unit="row", desc="teacher's logits", disable=None)
        with (
            writing(self.folder),
            bar,
            new_file(self.file, needed) as new,
            new.open("wb") as stream,
        ):
            np.lib.format.write_array_header_1_0(stream, header)
            for step in range(steps):
                for batch in batches(step):
                    for row in range(len(batch.inputs)):
                        stream.write(self._row(teacher, batch.part(slice(row, row + 1))).tobytes())
                        bar.update()

    def _row(self, teacher: Decoder, batch: Batch) -> np.ndarray:
        logits, top_k = batch_logits(teacher, batch)[0].astype(mx.float32), self.shape[2]
        chosen = mx.argpartition(-logits, kth=top_k - 1, axis=-1)[:, :top_k]
        likeliest = mx.take_along_axis(logits, chosen, axis=-1)
        row = np.empty(len(logits), self._dtype)
        row["tokens"] = np.array(chosen.astype(mx.int32))
        row["logits"] = np.array(likeliest - likeliest.max(axis=-1, keepdims=True))
        return row

    def batches(self, batches: Batches) -> Batches:
        """The same batches with what the teacher expects, read from the file as they are needed.

        Raises:
            TrainingError: The file is damaged.
        """
        known = self._read()

        def of_step(step: int) -> list[Batch]:
            parts = batches(step)
            row = step * sum(len(part.inputs) for part in parts)
            found: list[Batch] = []
            for part in parts:
                stored = known[row : row + len(part.inputs)]
                row += len(part.inputs)
                arrays = {name: np.ascontiguousarray(stored[name]) for name in ("tokens", "logits")}
                found.append(
                    KnownBatch(**vars(part), likeliest=arrays["tokens"], logits=arrays["logits"])
                )
            return found

        return of_step

    def _read(self) -> StoredArray:
        def refuse(stream: BufferedReader) -> None:
            raise ValueError("it was changed while it was read")

        try:
            with open_file(self.file) as stream:
                if np.lib.format.read_magic(stream) != (1, 0):
                    raise ValueError("it is of another version of the format")
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
                start, size = stream.tell(), os.fstat(stream.fileno()).st_size
                found = StoredArray(stream, dtype, shape, start, refuse, self._damaged)
        except (OSError, ValueError) as error:
            raise self._damaged(str(error)) from error
        needed = start + math.prod(self.shape[:2]) * self._dtype.itemsize
        if dtype != self._dtype or shape != self.shape[:2] or size != needed:
            raise self._damaged(f"it holds {shape} of {dtype} in {size:,} bytes")
        return found

    def _damaged(self, why: str) -> TrainingError:
        return TrainingError(
            f"[distil] '{self.file}' must be what this run wrote but {why}. Remove it, and the run "
            "writes it again."
        )
