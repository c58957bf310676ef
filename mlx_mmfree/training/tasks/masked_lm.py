"""Filling in tokens that are left out of texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...hub.checkpoint.load import load_text_tokenizer
from ..batches import Batch
from ..settings import Settings
from .corpus_task import CorpusTask
from .masking import MaskedBatch, Masking, masked_count

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
        return mx.take_along_axis(x, mx.array(batch.places)[..., None], axis=1)

    @classmethod
    def largest_batch(cls, settings: Settings, model: Any, rows: int) -> Batch:
        length = settings.sequence_length
        targets = np.zeros((rows, masked_count(length, settings.mlm_probability)), np.int32)
        return MaskedBatch(
            np.zeros((rows, length), np.int32),
            targets,
            np.ones(targets.shape, np.float32),
            places=targets,
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
