"""What a fine-tuning run keeps: adapters, or a tuned model."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.replacing import new_file
from ..hub import Tokenizer, save_model
from ..hub.adapters import WEIGHTS_FILE, load_adapter_weights, write_adapter
from ..models import Decoder
from .callbacks import BestWeights, Callback
from .checkpoint import load_trainable


class AdapterFiles(Callback):
    """Keeps the best adapter in the run's folder and the last one in `last/`.

    Args:
        folder: The run's.
        model: A model with adapters.
        record: How the adapter is made.
        has_validation: Without, the last one is the best.
    """

    def __init__(
        self, folder: Path, model: Decoder, record: Mapping[str, Any], has_validation: bool
    ):
        self._folder = folder
        self._model = model
        self._record = record
        self._has_validation = has_validation

    def on_best(self, step: int) -> None:
        write_adapter(self._folder, self._model, {**self._record, "step": step})

    def on_save(self, step: int) -> None:
        if not self._has_validation:
            self.on_best(step)
        last = self._folder / "last"
        write_adapter(last, self._model, {**self._record, "step": step})
        with new_file(self._folder / f"{step:07d}_{WEIGHTS_FILE}") as new:
            shutil.copyfile(last / WEIGHTS_FILE, new)

    def finish(self) -> None:
        """Gives the model its best adapter."""
        load_adapter_weights(self._model, self._folder / WEIGHTS_FILE)


class TunedModel(BestWeights):
    """Keeps the best weights of a run, and at the end the model that has them.

    Args:
        folder: The run's.
        model: The model that is trained.
        tokenizer: Its files are copied beside the model.
        has_validation: Without, the last weights are the best.
    """

    def __init__(self, folder: Path, model: Decoder, tokenizer: Tokenizer, has_validation: bool):
        super().__init__(model, folder / "best.safetensors")
        self._folder = folder
        self._decoder = model
        self._tokenizer = tokenizer
        self._has_validation = has_validation

    def on_save(self, step: int) -> None:
        if not self._has_validation:
            self.on_best(step)

    def finish(self) -> None:
        """Gives the model its best weights and writes it to `model/`."""
        load_trainable(self._decoder, self._folder / "best.safetensors")
        save_model(self._folder / "model", self._decoder, self._tokenizer, overwrite=True)
