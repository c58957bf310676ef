"""What a training run keeps: an adapter, or a trained model."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx.utils import tree_unflatten

from ..files.checkpoint_files import ADAPTER_FILE
from ..files.writing import new_file
from ..hub import Tokenizer, save_model
from ..hub.adapters.adapter import load_adapter_weights, write_adapter
from ..hub.checkpoint.checkpoint import RUN_MODEL
from ..hub.checkpoint.load import MASTERS_FOLDER
from ..hub.checkpoint.save import check_target
from ..layers import pack_linears, packable
from ..models import Decoder, TokenModel
from .log import BestWeights, Callback
from .run_folder import load_learned, writing


class AdapterFiles(Callback):
    """Keeps the best adapter in the run's folder and the latest one in `last/`.

    Args:
        folder: Folder of the run.
        model: A model with adapters.
        record: The settings that the adapter was made with, to be written beside it.
        has_validation: Whether validation picks the best adapter. Without it, the latest is the best.
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
        file = self._folder / f"{step:07d}_{ADAPTER_FILE}"
        with writing(self._folder), new_file(file) as new:
            shutil.copyfile(last / ADAPTER_FILE, new)

    def finish(self) -> None:
        """Gives the model its best adapter."""
        load_adapter_weights(self._model, self._folder / ADAPTER_FILE)


class TrainedModel(BestWeights):
    """Keeps the best weights of a run, and writes models with these weights at the end.

    Args:
        folder: Folder of the run.
        model: The model that is trained.
        tokenizer: The tokenizer, or its folder, whose files are copied beside the models; `None` for a
            model of images.
        has_validation: Whether validation picks the best weights. Without it, the latest are the best.

    Raises:
        CheckpointError: A folder to be written holds other files, or holds the tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        model: TokenModel,
        tokenizer: Tokenizer | Path | None,
        has_validation: bool,
    ):
        super().__init__(model, folder / "best.safetensors", has_validation)
        source = tokenizer.folder if isinstance(tokenizer, Tokenizer) else tokenizer
        check_results(folder, source)
        self._folder = folder
        self._decoder = model
        self._tokenizer = tokenizer

    def finish(self) -> None:
        """Gives the model its best weights and writes it to `model/`.

        A ternary model is packed there, and `masters/` gets its float weights for further training.
        """
        load_learned(self._decoder, self._folder / "best.safetensors")
        save_trained(self._folder, self._decoder, self._tokenizer)


def check_results(folder: Path, source: Path | None) -> None:
    """Asks before hours of training whether `save_trained` may write to a run's folder.

    Raises:
        CheckpointError: A folder to be written holds other files, or holds the tokenizer.
    """
    for name in (RUN_MODEL, MASTERS_FOLDER):
        check_target((folder / name).resolve(), True, "training", [source] if source else [])


def save_trained(folder: Path, model: TokenModel, tokenizer: Tokenizer | Path | None) -> None:
    """Writes a model to `model/` of a run's folder.

    A ternary model is packed there, and `masters/` gets its float weights for further training.
    """
    floats = list(packable(model).items())
    if floats:
        save_model(folder / MASTERS_FOLDER, model, tokenizer, overwrite=True)
    pack_linears(model)
    try:
        save_model(folder / RUN_MODEL, model, tokenizer, overwrite=True)
    finally:
        model.update_modules(tree_unflatten(floats))


def kept_models(folder: Path) -> str:
    """Says where the model of a run was written."""
    masters = folder / MASTERS_FOLDER
    rest = f" and its float master weights to '{masters}'" if masters.exists() else ""
    return f"Wrote the model to '{folder / RUN_MODEL}'{rest}."
