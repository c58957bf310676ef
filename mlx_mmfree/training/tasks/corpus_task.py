"""Tasks whose files are texts, as rows of tokens without an end."""

from pathlib import Path
from typing import Any

import numpy as np

from ..corpus.epoch_mixture import EpochMixture
from ..corpus.mixture import EPOCHS, RandomMixture
from ..run_tokens import check_corpus, open_tokens
from ..settings import Settings
from .task import Task


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
    def check_files(cls, settings: Settings, place: str = "train", key: str = "stages") -> None:
        super().check_files(settings, place, key)
        check_corpus(settings)

    def _rows(self, step: int) -> np.ndarray:
        """The token ids of a step, int32 `(rows, sequence_length + 1)`."""
        return self._mixture.rows(step)

    def held_out_rows(self, name: str, most_tokens: int) -> np.ndarray:
        """Rows one after another from the beginning of a held-out file.

        Args:
            name: The file.
            most_tokens: About how many tokens they have together at most; there is one row at least.

        Returns:
            Token ids, int32 `(rows, sequence_length + 1)`.
        """
        length, tokens = self._settings.sequence_length, self._files[name].tokens
        count = max(1, min(most_tokens, len(tokens) - 1) // length)
        places = np.arange(count)[:, None] * length + np.arange(length + 1)
        return tokens[: count * length + 1].astype(np.int32)[places]
