"""Callbacks, which the training loop tells how the run goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import TrainingError
from ..files.replacing import new_file
from ..hub.checkpoint.save import write_tensors
from .checkpoint import trainable
from .run_folder import writing


class Callback:
    """Is called by the loop. A method does nothing unless it is overridden."""

    def on_train(self, record: Mapping[str, Any]) -> None:
        """Takes a record of training: step, tokens, loss, learning rate, speed and memory."""

    def on_validation(self, record: Mapping[str, Any]) -> None:
        """Takes a record of a validation."""

    def on_best(self, step: int) -> None:
        """Is called when the model has its best validation loss so far."""

    def on_save(self, step: int) -> None:
        """Is called before a checkpoint is written, with the step that it is of."""


class BestWeights(Callback):
    """Keeps the trainable parameters with the best validation loss in a file.

    Args:
        model: The model that is trained.
        file: The file, which better parameters replace.
        has_validation: Whether validation picks the best parameters. Without it, the latest are the
            best.
    """

    def __init__(self, model: nn.Module, file: Path, has_validation: bool = True):
        self._model = model
        self._file = file
        self._has_validation = has_validation

    def on_best(self, step: int) -> None:
        with writing(self._file.parent), new_file(self._file) as new:
            write_tensors(new, trainable(self._model))

    def on_save(self, step: int) -> None:
        if not self._has_validation:
            self.on_best(step)


class WandbReport(Callback):
    """Sends the records to Weights & Biases.

    Args:
        project: Name of the project; `None` leaves it to wandb.
        folder: Folder of the run, which names the run.
        settings: The settings, which are sent with the run.

    Raises:
        TrainingError: wandb is not installed.
    """

    def __init__(self, project: str | None, folder: Path, settings: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as error:
            raise TrainingError(
                "[training] 'report_to' wandb needs the package wandb, which is not installed. "
                "Install it: pip install wandb"
            ) from error
        self._log = wandb.log
        wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings))

    def on_train(self, record: Mapping[str, Any]) -> None:
        self._log(dict(record), step=record["step"])

    def on_validation(self, record: Mapping[str, Any]) -> None:
        self._log(dict(record), step=record["step"])
