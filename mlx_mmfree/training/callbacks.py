"""Callbacks, which the training loop tells how the run goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..files.writing import new_file
from ..hub.checkpoint.save import write_tensors
from .checkpoint import learned
from .run_folder import writing


class Callback:
    """Is called by the loop. A method does nothing unless it is overridden."""

    def on_begin(self, step: int) -> None:
        """Is called before all else, with 0 in a new run or with the step of the checkpoint."""

    def on_train(self, record: Mapping[str, Any]) -> None:
        """Takes a record of training: step, tokens, loss, learning rate, speed and memory."""

    def on_validation(self, record: Mapping[str, Any]) -> None:
        """Takes a record of a validation."""

    def on_best(self, step: int) -> None:
        """Is called when the model has its best validation loss so far."""

    def on_save(self, step: int) -> None:
        """Is called before a checkpoint is written, with the step that it is of."""

    def on_end(self) -> None:
        """Is called when the run ends, is stopped or fails, unless `on_begin` failed."""


class BestWeights(Callback):
    """Keeps what the model has learned at the best validation loss in a file.

    Args:
        model: The model that is trained.
        file: The file, which better weights replace.
        has_validation: Whether validation picks the best weights. Without it, the latest are the best.
    """

    def __init__(self, model: nn.Module, file: Path, has_validation: bool = True):
        self._model = model
        self._file = file
        self._has_validation = has_validation

    def on_best(self, step: int) -> None:
        with writing(self._file.parent), new_file(self._file) as new:
            write_tensors(new, learned(self._model))

    def on_save(self, step: int) -> None:
        if not self._has_validation:
            self.on_best(step)
