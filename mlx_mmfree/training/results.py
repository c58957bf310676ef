"""The results of a run: its log, the services that it tells, and models with its best weights."""

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..files.checkpoint_files import ADAPTER_FILE
from ..files.reading import parse_json, read_file
from ..files.writing import new_file
from ..hub import Tokenizer, save_model
from ..hub.adapters.adapter_folder import load_adapter_weights, write_adapter
from ..hub.checkpoint.checkpoint import RUN_MODEL, open_checkpoint
from ..hub.checkpoint.load import MASTERS_FOLDER
from ..hub.checkpoint.parameter_reader import ParameterReader
from ..hub.checkpoint.save import check_target, write_tensors
from ..hub.publish.model_card import ModelCard, write_model_card
from ..hub.publish.runtimes import openings
from ..layers import pack_linears, packable
from ..models import Decoder, TokenModel
from ..platform.device import device_info
from ..platform.threads import thread_count
from ..version import __version__
from .run_folder import learned, load_learned, writing

_MAX_BYTES = 1_000_000_000


class RunLog:
    """Appends records to `log.jsonl`. A resumed run drops the records after the step it resumes at.

    Args:
        path: The file; `None` writes nothing.
        step: The step that the run begins at.

    Raises:
        TrainingError: The file cannot be written.
    """

    def __init__(self, path: Path | None, step: int):
        self._path = path
        if path is None:
            return
        records = [r for r in read_log(path) if r.get("step", 0) <= step] if step else []
        with writing(path.parent), new_file(path) as new:
            new.write_text("".join(json.dumps(record) + "\n" for record in records))

    def write(self, **record: Any) -> None:
        if self._path is None:
            return
        with writing(self._path.parent), self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, up to the first invalid line, such as one that a kill has cut short.

    Args:
        path: The file `log.jsonl` in the folder of a run.

    Returns:
        One dictionary for each line, first to last; none if there is no file.

    Example:
        >>> from pathlib import Path
        >>> size = Path("log.jsonl").write_text('{"step": 10, "loss": 2.5}\\n{"step": 2')
        >>> read_log(Path("log.jsonl"))
        [{'step': 10, 'loss': 2.5}]
    """
    records = []
    for line in read_file(path, _MAX_BYTES, is_member=True).splitlines() if path.exists() else []:
        try:
            record = parse_json(line, finite=False)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def is_figure(value: Any) -> bool:
    """Returns whether a value of a record is a finite number, which foreign logs need not hold."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    # a whole number beyond all floats
    except OverflowError:
        return False


class Clock:
    """Counts learned tokens per second since the last report, leaving out the time of validations."""

    def __init__(self) -> None:
        self.tokens = 0
        self._start = time.perf_counter()

    def rate(self) -> float:
        now = time.perf_counter()
        rate = self.tokens / (now - self._start)
        self.tokens, self._start = 0, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start


def environment() -> dict[str, Any]:
    """The facts that metrics of a run depend on, beside settings: versions, device and threads."""
    return {
        "mlx_version": version("mlx"),
        "library_version": __version__,
        "device": device_info().name,
        "machine": platform.machine(),
        "threads": thread_count(),
    }


class Callback:
    """Is called by the loop. A method does nothing unless it is overridden."""

    def on_start(self, words: str) -> None:
        """Takes a sentence on the model or the data, before the run begins."""

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


class AdapterFiles(Callback):
    """Keeps the best adapter in the run's folder and the latest one in `last/`.

    Args:
        folder: Folder of the run.
        model: A model with adapters.
        record: The settings that the adapter was made with, to be written beside it.
        has_validation: Whether validation picks the best adapter. Without it, the latest is the best.
        chat_template: The template that it is trained with, if it is not the model's.
    """

    def __init__(
        self,
        folder: Path,
        model: Decoder,
        record: Mapping[str, Any],
        has_validation: bool,
        chat_template: str | None = None,
    ):
        self._folder = folder
        self._model = model
        self._record = record
        self._has_validation = has_validation
        self._chat_template = chat_template

    def on_best(self, step: int) -> None:
        self._write(self._folder, step)

    def on_save(self, step: int) -> None:
        if not self._has_validation:
            self.on_best(step)
        last = self._folder / "last"
        self._write(last, step)
        file = self._folder / f"{step:07d}_{ADAPTER_FILE}"
        with writing(self._folder), new_file(file) as new:
            shutil.copyfile(last / ADAPTER_FILE, new)

    def _write(self, folder: Path, step: int) -> None:
        write_adapter(folder, self._model, {**self._record, "step": step}, self._chat_template)

    def finish(self) -> None:
        """Gives the model its best adapter."""
        load_adapter_weights(self._model, self._folder / ADAPTER_FILE)


class TrainedModel(BestWeights):
    """Keeps the best weights of a run, and writes models with these weights at the end.

    Args:
        folder: Folder of the run.
        model: The model that is trained.
        tokenizer: The tokenizer, or its folder, whose files are copied beside the models; `None` for an
            image model.
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


def write_cards(folder: Path, card: ModelCard, training: Callable[[bool], str]) -> None:
    """Writes cards and the source's licence files beside the models of a run, `model/` and `masters/`.

    Args:
        folder: The folder of the run.
        card: The sections on the source and on the command.
        training: From whether the model is ternary, the section on how it was trained.

    Raises:
        CheckpointError: A file cannot be written.
    """
    path = folder.resolve()
    for name in (RUN_MODEL, MASTERS_FOLDER):
        if not (path / name).exists():
            continue
        reader = ParameterReader(open_checkpoint(path / name))
        is_ternary = bool(reader.quantized or reader.ternary)
        of_model = replace(
            card,
            name=path.name if name == RUN_MODEL else f"{path.name}-{name}",
            format="hf",
            relation="finetune",
            openings=openings(reader, "hf", ""),
            is_ternary=is_ternary,
            training=training(is_ternary),
        )
        write_model_card(path / name, of_model)


def written_models(folder: Path) -> str:
    """A line with the folders to which the model of a run was written."""
    masters = folder / MASTERS_FOLDER
    rest = f" and its float master weights to '{masters}'" if masters.exists() else ""
    return f"Wrote the model to '{folder / RUN_MODEL}'{rest}."
