"""Tasks that learn from samples: classes of texts, pairs of texts, and classes of images."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...files.reading import tokenizer_files
from ...hub.checkpoint.load import load_text_tokenizer
from ...images import ImageProcessor
from ...models.parts.token_checks import check_tokens
from ...tokenizer.translation_tokenizer import open_translation_tokenizer
from ..batches import PADDED_TO, Batch
from ..corpus.mixture import EPOCHS, EpochMixture, RandomMixture
from ..corpus.rows import RowError, read_rows, text_of
from ..corpus.tokenize import byte_bar
from ..corpus.vocabulary import check_vocab_size
from ..image_sets import LabelledImage, digest_of, read_images
from ..losses.loss import smoothed_cross_entropy
from ..run_folder import file_digest
from ..settings import Settings
from .corpus import Task, padded

_POOL = 32
"""Steps whose samples are drawn together, so that samples of similar length come in one batch."""


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
    at random, or each once before any is repeated. Samples of similar length go into one batch.

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
        # a row of two numbers begins with a sample's
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

    def size(self) -> str:
        units = sum(int(sample.size) for sample in self._all) / len(self._all) * self._rows
        return (
            f"{len(self._all):,} samples to learn from; {self._rows} a step, about {units:,.0f} "
            f"{self.unit}."
        )

    def encode(self, line: Mapping[str, Any]) -> Any:
        """The sample of a line.

        Raises:
            RowError: The line holds none.
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
        number, index = divmod(step, _POOL)
        if self._pool[0] != number:
            self._pool = number, self._drawn(number)
        return self._pool[1][index]

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
        """The fingerprint of a file's content, and how it is read."""
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
            for sample in read_rows(path, self.encode, columns, on_bytes=bar.update):
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


@dataclass(frozen=True)
class LabelledText:
    """A text and its class.

    Attributes:
        tokens: Its token ids, int32 `(n,)`.
        label: The number of the class.
    """

    tokens: np.ndarray
    label: int

    @property
    def length(self) -> int:
        return len(self.tokens)

    size = length


class TextBatch(Batch):
    """Texts and their classes.

    Attributes: as `Batch`, but targets and weights are `(B, 1)`: one for each text.
    """

    @property
    def tokens(self) -> int:
        """Number of tokens that are read."""
        return int(self.inputs.size if self.valid is None else self.valid.sum())

    @property
    def terms(self) -> int:
        return len(self.inputs)


class ClassifierTask(SampleTask):
    """A classifier learns the labels of texts. The loss is a mean over texts.

    A label is one of those that the model's description names, or the number of a class.

    Args: as for `Task`.
    """

    def __init__(self, settings: Settings, model: Any, tokenizer: Path, share: tuple[int, int]):
        self._tokenizer = load_text_tokenizer(tokenizer)
        self._numbers = {label: number for number, label in enumerate(model.labels)}
        self._columns = self.columns(settings)
        self._vocab_size = model.vocab_size
        if settings.init_from is None:
            check_vocab_size(self._tokenizer.vocab_size, model.vocab_size)
        super().__init__(settings, model, tokenizer, share)

    @staticmethod
    def columns(settings: Settings) -> tuple[str, ...]:
        return settings.text_column, settings.label_column

    @staticmethod
    def hidden(model: Any, batch: Batch) -> mx.array:
        valid = None if batch.valid is None else mx.array(batch.valid)
        hidden: mx.array = model.hidden(mx.array(batch.inputs), valid)
        return hidden[:, None]

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        sample = LabelledText(np.zeros(settings.sequence_length, np.int32), 0)
        return cls.batch_of(model, [sample] * rows, settings.sequence_length)

    def encode(self, line: Mapping[str, Any]) -> LabelledText:
        text, label = self._columns
        tokens = self._tokenizer.encode(text_of(line, text))
        if not tokens:
            raise RowError(f"'{text}' must hold a token but is empty.")
        check_tokens(tokens, self._vocab_size)
        given = line.get(label)
        number = self._numbers.get(given) if isinstance(given, str) else given
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is None or not is_number or not 0 <= number < len(self._numbers):
            raise RowError(
                f"'{label}' must be one of {', '.join(map(repr, self._numbers))} or the number of one, "
                f"from 0, but got {given!r:.80}. The key 'labels' of 'model' names them."
            )
        return LabelledText(np.array(tokens, np.int32), number)

    @classmethod
    def batch_of(cls, model: Any, samples: Sequence[LabelledText], most: int) -> Batch:
        length = rounded_length(max(sample.length for sample in samples), most)
        inputs, valid = padded([sample.tokens for sample in samples], length)
        targets = np.array([[sample.label] for sample in samples], np.int32)
        return TextBatch(inputs, targets, np.ones(targets.shape, np.float32), valid)


@dataclass(frozen=True)
class TextPair:
    """A text and the one to write.

    Attributes:
        source: Token ids with the last, int32 `(m,)`.
        target: Token ids of the text to write, int32 `(n,)`.
    """

    source: np.ndarray
    target: np.ndarray

    @property
    def length(self) -> int:
        return max(len(self.source), len(self.target))

    @property
    def size(self) -> int:
        return len(self.source) + len(self.target)


@dataclass(frozen=True)
class TextPairBatch(Batch):
    """Texts and those to write.

    Attributes: as `Batch`, for the target, and
        source: Token ids of the source, int32 `(B, M)`.
        source_valid: `False` where it is padded, bool `(B, M)`; `None` if nothing is.
    """

    source: np.ndarray = field(kw_only=True)
    source_valid: np.ndarray | None = field(default=None, kw_only=True)


class EncoderDecoderTask(SampleTask):
    """An encoder-decoder learns each token of the target after those before it (arXiv 1706.03762).

    Args: as for `Task`.
    """

    def __init__(self, settings: Settings, model: Any, tokenizer: Path, share: tuple[int, int]):
        self._tokenizer = open_translation_tokenizer(tokenizer)
        self._columns = self.columns(settings)
        end = model.config.eos_token_id
        if self._tokenizer.eos_token_id != end:
            raise TrainingError(
                "[train] 'eos_token_id' of 'model' must be the token with which the tokenizer ends a "
                f"text, {self._tokenizer.eos_token_id}, but got {end}."
            )
        self._vocab_size = model.vocab_size
        if settings.init_from is None:
            check_vocab_size(self._tokenizer.vocab_size, model.vocab_size)
        super().__init__(settings, model, tokenizer, share)

    @staticmethod
    def columns(settings: Settings) -> tuple[str, ...]:
        return settings.source_column, settings.target_column

    @staticmethod
    def hidden(model: Any, batch: TextPairBatch) -> mx.array:
        arrays = (batch.source_valid, batch.valid)
        source_valid, valid = (None if a is None else mx.array(a) for a in arrays)
        memory = model.encode(mx.array(batch.source), source_valid)
        hidden, _ = model.read_target(
            mx.array(batch.inputs), memory, memory_valid=source_valid, valid=valid
        )
        return hidden

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        text = np.zeros(settings.sequence_length, np.int32)
        return cls.batch_of(model, [TextPair(text, text)] * rows, settings.sequence_length)

    def encode(self, line: Mapping[str, Any]) -> TextPair:
        source, target = (text_of(line, column) for column in self._columns)
        both = self._tokenizer.encode(source), self._tokenizer.encode_target(target)
        for tokens in both:
            check_tokens(tokens, self._vocab_size)
        return TextPair(*(np.array(tokens, np.int32) for tokens in both))

    @classmethod
    def batch_of(cls, model: Any, samples: Sequence[TextPair], most: int) -> Batch:
        sources = [sample.source for sample in samples]
        targets = [sample.target for sample in samples]
        lengths = [rounded_length(max(map(len, texts)), most) for texts in (sources, targets)]
        source, source_valid = padded(sources, lengths[0])
        target, valid = padded(targets, lengths[1])
        first = np.full((len(samples), 1), model.start_token_id, np.int32)
        inputs = np.concatenate([first, target[:, :-1]], axis=1)
        weights = np.ones(target.shape, np.float32) if valid is None else valid.astype(np.float32)
        return TextPairBatch(
            inputs, target, weights, valid, source=source, source_valid=source_valid
        )


class ImageBatch(Batch):
    """Images and their classes.

    Attributes: as `Batch`, but inputs are float32 `(B, H, W, C)`, targets and weights `(B, 1)`.
    """


def image_batch(processor: ImageProcessor, samples: Sequence[LabelledImage]) -> ImageBatch:
    """The batch of some images, prepared for a model."""
    images = np.array(processor([sample.picture for sample in samples]))
    targets = np.array([[sample.label] for sample in samples], np.int32)
    return ImageBatch(images, targets, np.ones(targets.shape, np.float32))


class ImageTask(SampleTask):
    """An image model learns their labels.

    What chance does to training images depends on the seed and the step alone.

    Args: as for `Task`.
    """

    unit: ClassVar[str] = "images"
    reads_text: ClassVar[bool] = False

    def __init__(
        self, settings: Settings, model: Any, tokenizer: Path | None, share: tuple[int, int]
    ):
        self._processor = ImageProcessor.from_config(model.config.to_hub())
        super().__init__(settings, model, tokenizer, share)

    @classmethod
    def logits(cls, model: Any, batch: Batch) -> mx.array:
        logits: mx.array = model(mx.array(batch.inputs))
        return logits[:, None]

    @classmethod
    def losses(cls, model: Any, batch: Batch, label_smoothing: float) -> mx.array:
        targets = mx.array(batch.targets)
        losses = smoothed_cross_entropy(cls.logits(model, batch), targets, label_smoothing)
        return losses * mx.array(batch.weights)

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        shape = (rows, *model.config.image_size, model.config.input_channels)
        targets = np.zeros((rows, 1), np.int32)
        return ImageBatch(np.zeros(shape, np.float32), targets, np.ones(targets.shape, np.float32))

    def batches(self, step: int) -> list[Batch]:
        settings, (rank, ranks) = self._settings, self._share
        key = np.random.SeedSequence([settings.seed, step])
        draw = np.random.Generator(np.random.Philox(key))
        found = []
        for batch in super().batches(step):
            # drawn for all processes, so that their number changes nothing
            shifts = draw.integers(
                -settings.random_shift, settings.random_shift + 1, (settings.batch_size, 2)
            )[rank::ranks]
            flips = draw.random(settings.batch_size)[rank::ranks] < settings.random_flip / 2
            images = moved(mirrored(batch.inputs, flips), shifts)
            found.append(replace(batch, inputs=images))
        return found

    def _batch(self, samples: Sequence[LabelledImage]) -> Batch:
        return image_batch(self._processor, samples)

    def _digest(self, name: str) -> str:
        return digest_of(self._settings.path(name))

    def _read(self, name: str) -> list[LabelledImage]:
        model = self._model
        return read_images(self._settings.path(name), model.config.labels, model.num_logits)


def mirrored(images: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Some of the images `(B, H, W, C)` with left and right exchanged."""
    return (
        np.where(which[:, None, None, None], images[:, :, ::-1], images) if which.any() else images
    )


def moved(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Images `(B, H, W, C)`, each moved by `(B, 2)` pixels down and right; the edges are repeated."""
    if not shifts.any():
        return images
    rows = np.arange(images.shape[1]) - shifts[:, :1]
    columns = np.arange(images.shape[2]) - shifts[:, 1:]
    rows, columns = (
        np.clip(coordinates, 0, size - 1)
        for coordinates, size in zip((rows, columns), images.shape[1:3], strict=True)
    )
    index = np.arange(len(images))[:, None, None]
    return images[index, rows[:, :, None], columns[:, None]]
