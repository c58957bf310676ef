"""The folder of a run: who may write to it, its checkpoint, and digests of what it began with."""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import local
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import CheckpointError, MMFreeError, TrainingError
from ..files.reading import MAX_BYTES, open_file, parse_json, read_file, with_floats, write_json
from ..files.tensors import read_arrays
from ..files.writing import UNKNOWN, clear_leftovers, made_folder, new_folder, try_lock_file
from ..hub.checkpoint.save import write_tensors
from ..layers.matrix import parameters
from ..layers.norms import running_statistics
from .samples import Samples


def file_digest(path: Path) -> str:
    """The digest of a file's content."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_digest(path: Path) -> str:
    """The digest of the content of a file of texts.

    Raises:
        TrainingError: The file cannot be read.
    """
    try:
        return file_digest(path)
    except OSError as error:
        raise TrainingError(f"[data] '{path}' must be a readable text file: {error}.") from error


def samples_digest(data: Mapping[str, Samples[Any]]) -> str:
    """The digest of the training and validation samples."""
    digest = hashlib.sha256()
    for name in ("train", "valid"):
        for part in data[name].content() if name in data else ():
            digest.update(part)
        digest.update(b"|")
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """The digest of the names, shapes and dtypes of a model's tensors and of 64 numbers of each."""
    digest = hashlib.sha256()
    for name, array in parameters(model).items():
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
        digest.update(np.array(array.reshape(-1)[:64].astype(mx.float32)).tobytes())
    return digest.hexdigest()


LOG_FILE = "log.jsonl"
"""A record in each line."""

_LOCK_FILE = ".lock"


class _Own(local):
    """The run folders of this thread. The functions that it calls may take them again."""

    folders: frozenset[Path] = frozenset()


_OWN = _Own()


@contextmanager
def writing(run: Path) -> Iterator[None]:
    """Turns a failed write inside the `with` block into one line about the run.

    Raises:
        TrainingError: The system refused a write, because the disk is full or the folder read-only.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"[training] '{run}' cannot be written: {error.strerror or error}; {saved_state(run)}. Free "
            "some space or choose another folder."
        ) from error


@contextmanager
def made_run_folder(run: Path) -> Iterator[None]:
    """Creates the folder if it is missing, and tries to write into it.

    If the block fails before anything is in it, the folder goes again.

    Raises:
        TrainingError: The folder is a file, or cannot be written.
    """
    if run.exists() and not run.is_dir():
        raise TrainingError(
            f"[training] the output must be a folder but '{run}' is a file. Choose another name."
        )
    with ExitStack() as stack:
        with writing(run):
            stack.enter_context(made_folder(run))
            # a kill leaves nothing of a file without a name
            tempfile.TemporaryFile(dir=run).close()
        yield


@contextmanager
def own_run_folder(run: Path, *, is_first: bool = True) -> Iterator[None]:
    """Creates the folder as `made_run_folder` does, and keeps other runs out of it inside the block.

    A run that is refused before it has learned anything leaves no new folder behind.

    Args:
        run: The folder.
        is_first: Whether this is the process that writes files. Another one belongs to the same run.

    Raises:
        TrainingError: The folder cannot be written, or another run is at work there.
    """
    is_new = not run.exists()
    with made_run_folder(run), _alone_in(run, is_first):
        try:
            yield
        except MMFreeError:
            if (
                is_new
                and is_first
                and not any(run.rglob(LOG_FILE))
                and not any(run.rglob(_PROGRESS))
            ):
                shutil.rmtree(run, ignore_errors=True)
            raise


@contextmanager
def _alone_in(run: Path, is_first: bool) -> Iterator[None]:
    """Keeps other runs out of a folder inside the block."""
    real = run.resolve()
    if not is_first or real in _OWN.folders:
        yield
        return
    file = real / _LOCK_FILE
    with writing(run):
        handle = try_lock_file(file)
    if handle is None:
        raise TrainingError(
            f"[training] '{run}' must be the folder of one run at a time but another process trains "
            "there. Wait until it ends, stop it, or choose another folder."
        )
    _OWN.folders |= {real}
    try:
        yield
    finally:
        _OWN.folders -= {real}
        file.unlink(missing_ok=True)
        if handle != UNKNOWN:
            os.close(handle)


_FOLDER, _PROGRESS = "checkpoint", "progress.json"


def new_progress(record: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of a new run. `record` holds all plain values that decide its course."""
    return {
        "step": 0,
        "tokens": 0,
        "best_loss": math.inf,
        "best_step": 0,
        "validations_since_best": 0,
        "unreported": {"loss": 0.0, "terms": 0},
        "settings": record,
    }


def save_checkpoint(
    run: Path, model: nn.Module, optimizer: optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Replaces the checkpoint of a run. A kill at any moment leaves either the old or the new one.

    Args:
        run: Folder of the run.
        model: The model, of which what it has learned is saved.
        optimizer: The optimizer whose state is saved.
        progress: Plain values, such as the step and the settings.

    Raises:
        OSError: The folder cannot be written.
    """
    with new_folder(run / _FOLDER, replaces=True) as new:
        write_tensors(new / "model.safetensors", learned(model))
        write_tensors(new / "optimizer.safetensors", dict(tree_flatten(optimizer.state)))
        write_json(new / _PROGRESS, progress)


def read_progress(run: Path) -> dict[str, Any] | None:
    """The progress in a run's checkpoint, or `None` if there is no checkpoint.

    Raises:
        TrainingError: The checkpoint is damaged.
    """
    folder = _checkpoint_folder(run)
    if folder is None:
        return None
    try:
        # the best loss is infinite before the first validation
        text = read_file(folder / _PROGRESS, MAX_BYTES, is_member=True)
        progress: dict[str, Any] = _with_terms(with_floats(parse_json(text, finite=False)))
        if not _is_like(progress, new_progress({})):
            raise ValueError(f"{_PROGRESS} must hold the numbers of a run but does not")
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from error
    return progress


def _with_terms(progress: Any) -> Any:
    """The progress of a run that was begun when every loss was a mean over tokens."""
    sums = progress.get("unreported") if isinstance(progress, dict) else None
    if isinstance(sums, dict) and "tokens" in sums:
        sums["terms"] = sums.pop("tokens")
    return progress


def check_record(run: Path, progress: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Checks that a run is resumed with the settings that it was begun with.

    Args:
        run: Folder of the run.
        progress: The progress in its checkpoint.
        record: All plain values that now decide the course of the run.

    Returns:
        Whether a finished run is to be extended to more `steps`.

    Raises:
        TrainingError: Another value differs.
    """
    old: dict[str, Any] = progress["settings"]
    new: dict[str, Any] = json.loads(json.dumps(record))
    differing = {key for key in old | new if old.get(key, ...) != new.get(key, ...)}
    if differing == {"steps"} and progress["step"] == old["steps"] < new["steps"]:
        return True
    if differing:
        # what is trained follows from the model and the settings
        named = ", ".join(sorted(differing - {"weights"}))
        other = f"with other values of {named}" if named else "that began with other weights"
        raise TrainingError(
            f"[training] '{run}' holds a run {other}. "
            "Resume with the same settings or give another output folder."
        )
    return False


def saved_state(run: Path) -> str:
    """A clause on what is saved of a run that ends early."""
    progress = read_progress(run)
    if progress is None:
        return "nothing had been saved yet"
    return f"the state of step {progress['step']} is kept in '{run}'"


def restore_checkpoint(run: Path, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Restores what the model has learned and the optimizer, in place, from a run's checkpoint.

    Raises:
        TrainingError: The checkpoint is missing or damaged, or belongs to another model.
    """
    folder = _checkpoint_folder(run)
    if folder is None:
        raise TrainingError(f"[training] '{run}' must hold a checkpoint but has none.")
    try:
        load_learned(model, folder / "model.safetensors")
        state = read_arrays(folder / "optimizer.safetensors")
        optimizer.state = tree_unflatten(list(state.items()))
    except (CheckpointError, RuntimeError, ValueError, KeyError) as error:
        raise _damaged(folder, error) from error


def load_learned(model: nn.Module, file: Path) -> None:
    """Sets what a model has learned from a file that `learned` filled.

    Raises:
        CheckpointError: The file is missing or damaged.
        ValueError: The file holds parameters of other names or shapes.
    """
    weights = read_arrays(file)
    want = {name: array.shape for name, array in learned(model).items()}
    got = {name: array.shape for name, array in weights.items()}
    if want != got:
        differing = sorted(name for name in want | got if want.get(name) != got.get(name))
        raise ValueError(f"it does not hold the parameters that the model trains: {differing[0]}")
    model.update(tree_unflatten(list(weights.items())))


def learned(model: nn.Module) -> dict[str, mx.array]:
    """The arrays that a run changes: trainable parameters and running statistics, by names in memory."""
    return {**dict(tree_flatten(model.trainable_parameters())), **running_statistics(model)}


def _is_like(value: Any, sample: Any) -> bool:
    """Returns whether a value has the keys of a sample and numbers of the same types."""
    if isinstance(sample, dict):
        return isinstance(value, dict) and all(
            name in value and _is_like(value[name], part) for name, part in sample.items()
        )
    is_number = isinstance(value, int) or (isinstance(value, float) and isinstance(sample, float))
    return is_number and not isinstance(value, bool)


def _checkpoint_folder(run: Path) -> Path | None:
    folder = run / _FOLDER
    if run.is_dir():
        # removes what a kill may leave while one checkpoint replaces another
        clear_leftovers(folder)
    return folder if folder.exists() else None


def _damaged(folder: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"[training] the checkpoint '{folder}' cannot be read ({error}). Delete it to start over."
    )
