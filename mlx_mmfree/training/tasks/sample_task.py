"""Tasks whose files hold samples, one on each line."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ...errors import TrainingError
from ...files.checkpoint_files import tokenizer_files
from ..batches import PADDED_TO, Batch
from ..corpus.byte_bar import byte_bar
from ..corpus.epoch_mixture import EpochMixture
from ..corpus.mixture import EPOCHS, RandomMixture
from ..digests import file_digest
from ..lines import read_lines
from ..settings import Settings
from .task import Task

_POOL = 32
"""Steps whose samples are drawn together, so that those of similar length come in one batch."""


class Item(Protocol):
    """A sample.

    Attributes:
        length: Tokens of its longest text.
        size: Tokens of all its texts.
    """

    @property
    def length(self) -> int: ...

    @property
    def size(self) -> int: ...


Found = TypeVar("Found", bound=Item)


class SampleTask(Task):
    """A task whose batches are made of whole samples.

    A file of a stage is drawn in proportion to its weight times its number of samples, and its samples
    at random, or each once before any comes again. Samples of similar length go into one batch.

    Args: as for `Task`.
    """

    def __init__(
        self, settings: Settings, model: Any, tokenizer: Path | None, share: tuple[int, int]
    ):
        super().__init__(settings, model, tokenizer, share)
        self._tokenizer_folder = tokenizer
        trained = sorted({name for stage in settings.stages for name in stage.weights})
        self._samples = {name: self._read(name) for name in sorted({*trained, *settings.valid})}
        self._all = [sample for name in trained for sample in self._samples[name]]
        ends = np.cumsum([len(self._samples[name]) for name in trained]).tolist()
        # a row of two numbers begins with that of a sample
        numbers = {
            name: np.arange(end - len(self._samples[name]), end + 1)
            for name, end in zip(trained, ends, strict=True)
        }
        self._rows = settings.batch_size * settings.accumulation_steps
        self._mixture = (EpochMixture if settings.order == EPOCHS else RandomMixture)(
            numbers, settings.stages, settings.seed, steps=settings.steps, rows=self._rows, length=1
        )
        self._pool: tuple[int, list[list[Any]]] = (-1, [])
        self.digests = {name: self._digest(name) for name in self._samples}

    def encode(self, line: Mapping[str, Any]) -> Any:
        """The sample of a line.

        Raises:
            LineError: The line holds none.
        """
        raise NotImplementedError

    @classmethod
    def batch_of(cls, model: Any, samples: Sequence[Any], most: int) -> Batch:
        """The batch of some samples, of which none is longer than `most`."""
        raise NotImplementedError

    def batches(self, step: int) -> list[Batch]:
        size, (rank, ranks) = self._settings.batch_size, self._share
        samples = self._samples_of(step)
        parts = [samples[first : first + size] for first in range(0, self._rows, size)]
        return [self._batch(part[rank::ranks]) for part in parts]

    def _batch(self, samples: Sequence[Any]) -> Batch:
        return self.batch_of(self._model, samples, self._settings.sequence_length)

    def held_out_batches(self, name: str, most_tokens: int | None) -> Iterator[Batch]:
        samples = self._samples[name]
        if most_tokens is not None:
            before = np.cumsum([0, *(sample.size for sample in samples)])[:-1]
            samples = samples[: int(np.count_nonzero(before < most_tokens))]
        in_order = sorted(samples, key=lambda sample: int(sample.length))
        size = self._settings.batch_size
        for first in range(0, len(in_order), size):
            yield self._batch(in_order[first : first + size])

    def _samples_of(self, step: int) -> list[Any]:
        """The samples of a step, the shortest first."""
        number, place = divmod(step, _POOL)
        if self._pool[0] != number:
            self._pool = number, self._drawn(number)
        return self._pool[1][place]

    def _drawn(self, number: int) -> list[list[Any]]:
        """The samples of the steps of a pool."""
        first = number * _POOL
        steps = range(first, min(first + _POOL, self._settings.steps))
        drawn = np.concatenate([self._mixture.rows(step)[:, 0] for step in steps])
        in_order = sorted(
            (self._all[n] for n in drawn.tolist()), key=lambda sample: int(sample.length)
        )
        key = np.random.SeedSequence([self._settings.seed, number])
        order = np.random.Generator(np.random.Philox(key)).permutation(len(steps))
        return [in_order[n * self._rows : (n + 1) * self._rows] for n in order.tolist()]

    def _digest(self, name: str) -> str:
        """What tells the content of a file, and how it is read."""
        digest = hashlib.sha256(file_digest(self._settings.path(name)).encode())
        if self._tokenizer_folder is not None:
            for file, path in sorted(tokenizer_files(self._tokenizer_folder).items()):
                digest.update(f" {file} {file_digest(path)}".encode())
        return digest.hexdigest()

    def _read(self, name: str) -> list[Any]:
        """The samples of a file."""
        path = self._settings.path(name)
        try:
            bar = byte_bar(path.stat().st_size, f"tokenizing {path.name}")
        except OSError as error:
            raise TrainingError(f"[data] '{path}' cannot be read: {error}.") from error
        found, longer = [], 0
        with bar:
            columns = self.columns(self._settings)
            for sample in read_lines(path, self.encode, columns, on_bytes=bar.update):
                if sample.length > self._settings.sequence_length:
                    longer += 1
                else:
                    found.append(sample)
        if not found:
            raise TrainingError(
                f"[train] '{name}' must hold a sample of at most 'sequence_length', "
                f"{self._settings.sequence_length}, tokens but has none."
            )
        if longer:
            print(
                f"{longer} of {longer + len(found)} samples of '{name}' are left out, since they are "
                f"longer than 'sequence_length', {self._settings.sequence_length} tokens.",
                file=sys.stderr,
            )
        return found


def rounded_length(longest: int, most: int) -> int:
    """The length that rows are padded to, so that few shapes are compiled."""
    return min(most, -(-longest // PADDED_TO) * PADDED_TO)
