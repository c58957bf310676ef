"""What a run learns: the batches of its steps, their loss, and how it is measured."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...files.reading import open_file
from ...ops import cross_entropy, long_sum
from ..batches import Batch
from ..loss import Loss, kept_logits, target_losses
from ..settings import Settings


class Task:
    """What a model learns from the files of a run. A kind of model has one of its own.

    Args:
        settings: The run.
        model: The model.
        tokenizer: Folder of its tokenizer; `None` for images.
        share: The rank of this process and their number. It takes its rows of each batch.

    Attributes:
        unit: What the log counts as tokens.
        reads_text: Whether a run needs a tokenizer.
        mask_token: A token beside the end of a text that a vocabulary needs which the run trains.
        digests: What tells the content of each file of the run, by its name in the settings.

    Raises:
        TrainingError: A file cannot be read, or does not belong to the tokenizer or the model.
    """

    unit: ClassVar[str] = "tokens"
    reads_text: ClassVar[bool] = True
    mask_token: ClassVar[str | None] = None
    digests: Mapping[str, str]

    def __init__(
        self, settings: Settings, model: Any, tokenizer: Path | None, share: tuple[int, int]
    ):
        self._settings = settings
        self._model = model
        self._share = share

    @classmethod
    def check_files(cls, settings: Settings, place: str = "train", key: str = "stages") -> None:
        """Refuses a run whose files are not there, before it does anything else.

        Args:
            settings: The run.
            place, key: The command and the key of the training files, as messages name them.

        Raises:
            TrainingError: A file cannot be opened, or there is no folder of the tokenizer.
        """
        for name in settings.files:
            path = settings.path(name)
            try:
                if cls.reads_text or not path.is_dir():
                    open_file(path).close()
            except OSError as error:
                is_trained = any(name in stage.weights for stage in settings.stages)
                raise TrainingError(
                    f"[{place}] '{key if is_trained else 'valid'}' must name files that can be read but "
                    f"'{path}' cannot: {error.strerror or error}. Correct its name, or put it there."
                ) from error
        if settings.tokenizer is not None and not settings.path(settings.tokenizer).is_dir():
            raise TrainingError(
                f"[{place}] 'tokenizer' must be the folder of a tokenizer but got "
                f"'{settings.path(settings.tokenizer)}', which is none."
            )

    @staticmethod
    def columns(settings: Settings) -> tuple[str, ...]:
        """The columns of the files that hold texts; none if the files are texts."""
        return ()

    @staticmethod
    def hidden(model: Any, batch: Any) -> mx.array:
        """What the head reads for each target of a batch, `(B, N, D)`."""
        raise NotImplementedError

    @classmethod
    def logits(cls, model: Any, batch: Any) -> mx.array:
        """The logits of each target of a batch, `(B, N, K)`."""
        logits: mx.array = model.logits(cls.hidden(model, batch))
        return logits

    @classmethod
    def losses(cls, model: Any, batch: Any, label_smoothing: float) -> mx.array:
        """The cross-entropy of each target times its weight, float32 `(B, N)`."""
        return target_losses(model, cls.hidden(model, batch), batch, label_smoothing)

    @classmethod
    def loss(cls, settings: Settings) -> Loss:
        """The loss of a run: the sum of the cross-entropies of the targets, in nats."""
        return summed_loss(cls, settings.label_smoothing)

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        """A batch as large as the largest of a run, with so many rows."""
        raise NotImplementedError

    def batches(self, step: int) -> list[Batch]:
        """The rows of a step that this process takes, a batch for each forward pass."""
        raise NotImplementedError

    def held_out_batches(self, name: str, most_tokens: int | None) -> Iterable[Batch]:
        """Batches of a held-out file: of about its first `most_tokens` tokens, or of all."""
        raise NotImplementedError

    def validate(self, model: Any) -> dict[str, float]:
        """The loss of the first held-out file, which picks the best weights, and what goes with it."""
        settings = self._settings
        figures = self._figures(model, settings.valid[0], settings.valid_tokens)
        return {f"valid_{name}": value for name, value in figures.items()}

    def held_out(self, model: Any) -> dict[str, float]:
        """The figures of the whole held-out files."""
        return {
            f"{Path(name).name.split('.')[0]}/{figure}": value
            for name in self._settings.valid
            for figure, value in self._figures(model, name, None).items()
        }

    def _figures(self, model: Any, name: str, most_tokens: int | None) -> dict[str, float]:
        return self.figures(model, self.held_out_batches(name, most_tokens))

    @classmethod
    def figures(cls, model: Any, batches: Iterable[Batch]) -> dict[str, float]:
        """The mean loss of the targets, and the share of those that have the largest logit."""
        loss, hits, weight = 0.0, 0.0, 0.0
        for batch in batches:
            for part in _small_parts(model, batch):
                logits = cls.logits(model, part)
                targets, weights = mx.array(part.targets), mx.array(part.weights)
                is_hit = mx.argmax(logits, axis=-1) == targets
                loss += float(long_sum(cross_entropy(logits, targets) * weights))
                hits += float(long_sum(is_hit * weights))
                weight += float(part.weights.sum())
        return {"loss": loss / weight, "accuracy": hits / weight}

    def _split(self, batch: Batch) -> list[Batch]:
        """The rows of a step, for each forward pass those of this process."""
        size, (rank, ranks) = self._settings.batch_size, self._share
        parts = self._settings.accumulation_steps
        return [batch.part(slice(n * size + rank, (n + 1) * size, ranks)) for n in range(parts)]


def summed_loss(task: type[Task], label_smoothing: float = 0.0) -> Loss:
    """The sum of the losses of the targets of a batch."""
    return partial(_loss, task, label_smoothing=label_smoothing)


def _loss(task: type[Task], model: Any, batch: Any, *, label_smoothing: float) -> mx.array:
    return long_sum(task.losses(model, batch, label_smoothing))


def _small_parts(model: Any, batch: Batch) -> Iterator[Batch]:
    """Rows of a batch whose logits are held at a time."""
    rows, width = batch.targets.shape
    most = max(1, kept_logits(model, batch) // (width * model.num_logits))
    return (batch.part(slice(first, first + most)) for first in range(0, rows, most))


def padded(rows: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows of ids as int32 `(B, length)`, and which are real, `None` if all are."""
    ids = np.zeros((len(rows), length), np.int32)
    for place, row in zip(ids, rows, strict=True):
        place[: len(row)] = row
    valid = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    return ids, None if valid.all() else valid
