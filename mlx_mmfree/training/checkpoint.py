"""The checkpoint of a training run: what the model has learned, optimizer state and progress."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import CheckpointError, TrainingError
from ..files.reading import MAX_BYTES, parse_json, read_member, write_json
from ..files.tensors import read_arrays
from ..files.writing import clear_leftovers, new_folder
from ..hub.checkpoint.save import write_tensors
from ..layers.norms import running_statistics

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
        text = read_member(folder / _PROGRESS, MAX_BYTES)
        progress: dict[str, Any] = _with_terms(parse_json(text, finite=False))
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
        raise TrainingError(
            f"[training] '{run}' holds a run with other values of {', '.join(sorted(differing))}. "
            "Resume with the same settings or give another output folder."
        )
    return False


def kept_state(run: Path) -> str:
    """Says what is kept of a run that ends early."""
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
    """What a run changes in a model: trainable parameters and running statistics, by names in memory."""
    return {**dict(tree_flatten(model.trainable_parameters())), **running_statistics(model)}


def _is_like(value: Any, sample: Any) -> bool:
    """Whether a value has the keys of a sample and numbers of the same types."""
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
