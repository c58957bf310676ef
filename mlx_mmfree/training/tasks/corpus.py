"""The task of a model in a run from files, and the tasks that learn from long texts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...evaluation import measure_perplexity
from ...evaluation.perplexity import Perplexity
from ...files.reading import open_file
from ...hub.checkpoint.load import load_text_tokenizer
from ...ops import cross_entropy, long_sum
from ..batches import Batch
from ..corpus.mixture import EPOCHS, EpochMixture, RandomMixture
from ..corpus.token_files import check_corpus, open_tokens
from ..losses.loss import Loss, batch_hidden, logits_at_a_time, next_token_loss, target_losses
from ..settings import Settings


class Task:
    """The task of a model in a run from files. A kind of model has one of its own.

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
    def check_files(cls, settings: Settings, command: str = "train", key: str = "stages") -> None:
        """Refuses a run whose files are not there, before it does anything else.

        Args:
            settings: The run.
            command: The command, as messages name it.
            key: The key of the training files, as messages name it.

        Raises:
            TrainingError: A file cannot be opened, or there is no folder of the tokenizer.
        """
        for name in settings.files:
            path = settings.path(name)
            try:
                paths = [path] if cls.columns(settings) else settings.corpus(name)
                for path in paths:
                    if cls.reads_text or not path.is_dir():
                        open_file(path).close()
            except OSError as error:
                raise TrainingError(
                    f"[{command}] '{_key(settings, name, key)}' must name files that can be read but "
                    f"'{path}' cannot: {error.strerror or error}. Correct its name, or put it there."
                ) from error
        if settings.tokenizer is not None and not settings.path(settings.tokenizer).is_dir():
            raise TrainingError(
                f"[{command}] 'tokenizer' must be the folder of a tokenizer but got "
                f"'{settings.path(settings.tokenizer)}', which is none."
            )

    def size(self) -> str:
        """A sentence on how much the run learns from."""
        raise NotImplementedError

    @staticmethod
    def columns(settings: Settings) -> tuple[str, ...]:
        """The columns of the files that hold texts; none if the files are texts."""
        return ()

    @staticmethod
    def hidden(model: Any, batch: Any) -> mx.array:
        """The input of the head for each target of a batch, `(B, N, D)`."""
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
        metrics = self._metrics(model, settings.valid[0], settings.valid_tokens)
        return {f"valid_{name}": value for name, value in metrics.items()}

    def held_out(self, model: Any) -> dict[str, float]:
        """The metrics of the whole held-out files."""
        return {
            f"{Path(name).name.split('.')[0]}/{figure}": value
            for name in self._settings.valid
            for figure, value in self._metrics(model, name, None).items()
        }

    def _metrics(self, model: Any, name: str, most_tokens: int | None) -> dict[str, float]:
        return self.metrics(model, self.held_out_batches(name, most_tokens))

    @classmethod
    def metrics(cls, model: Any, batches: Iterable[Batch]) -> dict[str, float]:
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
        """The rows of a step, for each forward pass this process's."""
        size, (rank, ranks) = self._settings.batch_size, self._share
        parts = self._settings.accumulation_steps
        return [batch.part(slice(n * size + rank, (n + 1) * size, ranks)) for n in range(parts)]


def _key(settings: Settings, name: str, of_training: str) -> str:
    """The key of the settings that names a file."""
    is_trained = any(name in stage.weights for stage in settings.stages)
    return of_training if is_trained else "valid"


def summed_loss(task: type[Task], label_smoothing: float) -> Loss:
    """The sum of the losses of the targets of a batch."""
    return partial(_loss, task, label_smoothing=label_smoothing)


def _loss(task: type[Task], model: Any, batch: Any, *, label_smoothing: float) -> mx.array:
    return long_sum(task.losses(model, batch, label_smoothing))


def _small_parts(model: Any, batch: Batch) -> Iterator[Batch]:
    """Rows of a batch whose logits are in memory at a time."""
    rows, width = batch.targets.shape
    most = max(1, logits_at_a_time(model, batch.targets.size) // (width * model.num_logits))
    return (batch.part(slice(first, first + most)) for first in range(0, rows, most))


def padded(rows: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows of ids as int32 `(B, length)`, and which are real, `None` if all are."""
    ids = np.zeros((len(rows), length), np.int32)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row
    valid = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    return ids, None if valid.all() else valid


class CorpusTask(Task):
    """A task whose rows are cut from texts or token files.

    Args: as for `Task`.
    """

    def __init__(self, settings: Settings, model: Any, tokenizer: Path, share: tuple[int, int]):
        super().__init__(settings, model, tokenizer, share)
        self._files = open_tokens(settings, tokenizer, model.vocab_size)
        self.digests = {name: file.header.checksum for name, file in self._files.items()}
        names = {name for stage in settings.stages for name in stage.weights}
        self._mixture = (EpochMixture if settings.order == EPOCHS else RandomMixture)(
            {name: self._files[name].tokens for name in names},
            settings.stages,
            settings.seed,
            steps=settings.steps,
            rows=settings.batch_size * settings.accumulation_steps,
            length=settings.sequence_length,
        )

    @classmethod
    def check_files(cls, settings: Settings, command: str = "train", key: str = "stages") -> None:
        super().check_files(settings, command, key)
        check_corpus(settings)
        for name in settings.files:
            if not any(path.stat().st_size for path in settings.corpus(name)):
                raise TrainingError(
                    f"[{command}] '{_key(settings, name, key)}' must name files that hold texts or "
                    f"tokens but '{settings.path(name)}' is empty. Put texts into it, or name another."
                )

    def size(self) -> str:
        settings = self._settings
        names = {name for stage in settings.stages for name in stage.weights}
        tokens = sum(len(self._files[name].tokens) for name in names)
        rows = settings.batch_size * settings.accumulation_steps
        return (
            f"{tokens:,} tokens to learn from; {rows * settings.sequence_length:,} a step, in {rows} "
            f"sequences of {settings.sequence_length}."
        )

    @property
    def repeats_at_once(self) -> bool:
        """True if a run in epochs reads a sequence twice in its first step, as the files are short."""
        return isinstance(self._mixture, EpochMixture) and self._mixture.repeats_at_once

    def _rows(self, step: int) -> np.ndarray:
        """The token ids of a step, int32 `(rows, sequence_length + 1)`."""
        return self._mixture.rows(step)

    def held_out_rows(self, name: str, most_tokens: int) -> np.ndarray:
        """Rows one after another from the start of a held-out file.

        Args:
            name: The file.
            most_tokens: About how many tokens they have together at most; there is one row at least.

        Returns:
            Token ids, int32 `(rows, sequence_length + 1)`.
        """
        length, tokens = self._settings.sequence_length, self._files[name].tokens
        count = max(1, min(most_tokens, len(tokens) - 1) // length)
        indices = np.arange(count)[:, None] * length + np.arange(length + 1)
        return tokens[: count * length + 1].astype(np.int32)[indices]


class CausalLMTask(CorpusTask):
    """A causal language model learns the next token of each position of a row."""

    @staticmethod
    def hidden(model: Any, batch: Batch) -> mx.array:
        return batch_hidden(model, batch)

    @classmethod
    def loss(cls, settings: Settings) -> Loss:
        if not settings.label_smoothing:
            return next_token_loss
        return partial(next_token_loss, label_smoothing=settings.label_smoothing)

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        return Batch.of_rows(np.zeros((rows, settings.sequence_length + 1), np.int32))

    def batches(self, step: int) -> list[Batch]:
        return self._split(Batch.of_rows(self._rows(step)))

    def validate(self, model: Any) -> dict[str, float]:
        settings = self._settings
        measured = self._measured(model, settings.valid[0], settings.valid_tokens + 1)
        return {"valid_loss": measured.loss}

    def held_out(self, model: Any) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name in self._settings.valid:
            measured = self._measured(model, name, None)
            label = Path(name).name.split(".")[0]
            metrics[f"{label}/perplexity"] = measured.perplexity
            metrics[f"{label}/bits_per_byte"] = measured.bits_per_byte
        return metrics

    def _measured(self, model: Any, name: str, most_tokens: int | None) -> Perplexity:
        file, length = self._files[name], self._settings.sequence_length
        tokens = file.tokens if most_tokens is None else file.tokens.first(most_tokens)
        return measure_perplexity(model, tokens, file.header.size_bytes, length=length)


_MASKED, _REPLACED = 0.8, 0.1
"""Of the tokens that are to be filled in, those that are masked, and those that are others. The rest
stays as it is."""


@dataclass(frozen=True)
class MaskedBatch(Batch):
    """Rows of tokens, of which some are to be filled in: K of each.

    Attributes: as `Batch`, but targets and weights are `(B, K)`, and
        positions: Where the targets stood, int32 `(B, K)`.
    """

    positions: np.ndarray = field(kw_only=True)


def masked_count(length: int, probability: float) -> int:
    """How many of so many tokens are to be filled in."""
    return max(1, round(length * probability))


class Masking:
    r"""Chooses tokens at random, and hides most of them (Devlin et al., arXiv 1810.04805).

    Of the L tokens of a row, :math:`\max(1, \mathrm{round}(p L))` are chosen, as in the published code.
    Special tokens are chosen only in a row that holds no others. A chosen token becomes the mask with a
    probability of 0.8 and any ordinary token with one of 0.1.

    Args:
        mask: The id of the mask token.
        special: The ids of the special tokens.
        vocab_size: Number of tokens.
        probability: The share p.
    """

    def __init__(self, mask: int, special: Sequence[int], vocab_size: int, probability: float):
        self._mask = mask
        self._special = np.array(special, np.int32)
        self._ordinary = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), self._special)
        self._probability = probability

    def batch(self, rows: np.ndarray, random: np.random.Generator) -> MaskedBatch:
        """The batch of rows `(B, L)`."""
        size, length = rows.shape
        count = masked_count(length, self._probability)
        may = ~np.isin(rows, self._special)
        may |= ~may.any(axis=1, keepdims=True)
        order = np.where(may, random.random(rows.shape), np.inf)
        positions = np.sort(np.argsort(order, axis=1, kind="stable")[:, :count], axis=1)
        is_chosen = np.take_along_axis(may, positions, axis=1)
        targets = np.take_along_axis(rows, positions, axis=1)
        fate = random.random((size, count))
        others = random.choice(self._ordinary, (size, count))
        shown = np.where(fate < _MASKED, self._mask, targets)
        shown = np.where((fate >= _MASKED) & (fate < _MASKED + _REPLACED), others, shown)
        inputs = rows.copy()
        np.put_along_axis(inputs, positions, np.where(is_chosen, shown, targets), axis=1)
        return MaskedBatch(
            inputs.astype(np.int32),
            targets.astype(np.int32),
            is_chosen.astype(np.float32),
            positions=positions.astype(np.int32),
        )


_OF_TRAINING, _OF_VALIDATION = range(2)


class MaskedLMTask(CorpusTask):
    """A masked language model learns the tokens that it does not see (arXiv 1810.04805).

    What is left out of the rows of a step depends on the seed and the step, and of a held-out file on
    the seed alone.

    Args: as for `Task`.

    Raises:
        TrainingError: Also if the tokenizer has no mask token.
    """

    mask_token: ClassVar[str] = "[MASK]"

    def __init__(self, settings: Settings, model: Any, tokenizer: Path, share: tuple[int, int]):
        super().__init__(settings, model, tokenizer, share)
        known = load_text_tokenizer(tokenizer)
        if known.mask_token_id is None:
            raise TrainingError(
                f"[train] the tokenizer in '{tokenizer}' must name a mask token, 'mask_token', for a "
                "masked language model but names none. Leave 'tokenizer' out to train one on the texts."
            )
        if known.mask_token_id >= model.vocab_size:
            raise TrainingError(
                f"[train] the mask token of '{tokenizer}' must be below {model.vocab_size}, the rows of "
                f"the model's embedding, but is {known.mask_token_id}. Use the tokenizer that belongs "
                "to the model."
            )
        self._masking = Masking(
            known.mask_token_id,
            sorted(known.special_tokens.values()),
            min(known.vocab_size, model.vocab_size),
            settings.mlm_probability,
        )

    @staticmethod
    def hidden(model: Any, batch: MaskedBatch) -> mx.array:
        x = model.hidden(mx.array(batch.inputs))
        return mx.take_along_axis(x, mx.array(batch.positions)[..., None], axis=1)

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        length = settings.sequence_length
        targets = np.zeros((rows, masked_count(length, settings.mlm_probability)), np.int32)
        return MaskedBatch(
            np.zeros((rows, length), np.int32),
            targets,
            np.ones(targets.shape, np.float32),
            positions=targets,
        )

    def batches(self, step: int) -> list[Batch]:
        return self._split(self._masked(self._rows(step)[:, :-1], _OF_TRAINING, step))

    def held_out_batches(self, name: str, most_tokens: int | None) -> Iterator[Batch]:
        tokens, length = self._files[name].tokens, self._settings.sequence_length
        count = max(1, min(len(tokens), most_tokens or len(tokens)) // length)
        size = self._settings.batch_size
        for number, first in enumerate(range(0, count, size)):
            part = tokens[first * length : min(first + size, count) * length].astype(np.int32)
            yield self._masked(part.reshape(-1, length), _OF_VALIDATION, number)

    def _masked(self, rows: np.ndarray, use: int, number: int) -> MaskedBatch:
        key = np.random.SeedSequence([self._settings.seed, number, use])
        return self._masking.batch(rows, np.random.Generator(np.random.Philox(key)))
