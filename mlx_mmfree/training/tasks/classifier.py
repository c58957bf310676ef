"""Sorting texts into classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...hub.checkpoint.load import load_text_tokenizer
from ...models.parts.tokens import check_tokens
from ..batches import Batch
from ..lines import LineError, text_of
from ..settings import Settings
from ..vocabulary import check_vocab_size
from .sample_task import SampleTask, rounded_length
from .task import padded


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
            raise LineError(f"'{text}' must hold a token but is empty.")
        check_tokens(tokens, self._vocab_size)
        given = line.get(label)
        number = self._numbers.get(given) if isinstance(given, str) else given
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is None or not is_number or not 0 <= number < len(self._numbers):
            raise LineError(
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
