"""Writing one text after reading another, such as its translation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...models.parts.tokens import check_tokens
from ...tokenizer.pair_tokenizer import open_pair_tokenizer
from ..batches import Batch
from ..lines import text_of
from ..settings import Settings
from ..vocabulary import check_vocab_size
from .sample_task import SampleTask, rounded_length
from .task import padded


@dataclass(frozen=True)
class TextPair:
    """A text and the one to write.

    Attributes:
        source: Token ids with the last, int32 `(m,)`.
        target: Those of the other, int32 `(n,)`.
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
        self._tokenizer = open_pair_tokenizer(tokenizer)
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
