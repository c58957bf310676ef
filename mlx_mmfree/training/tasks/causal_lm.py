"""Predicting the next token of texts."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...evaluation import measure_perplexity
from ...evaluation.perplexity import Perplexity
from ..batches import Batch
from ..loss import Loss, batch_hidden, next_token_loss
from ..settings import Settings
from .corpus_task import CorpusTask


class CausalLMTask(CorpusTask):
    """A causal language model learns the next token of each place of a row."""

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
        figures: dict[str, float] = {}
        for name in self._settings.valid:
            measured = self._measured(model, name, None)
            label = Path(name).name.split(".")[0]
            figures[f"{label}/perplexity"] = measured.perplexity
            figures[f"{label}/bits_per_byte"] = measured.bits_per_byte
        return figures

    def _measured(self, model: Any, name: str, most_tokens: int | None) -> Perplexity:
        file, length = self._files[name], self._settings.sequence_length
        tokens = file.tokens if most_tokens is None else file.tokens.first(most_tokens)
        return measure_perplexity(model, tokens, file.header.size_bytes, length=length)
