"""The state of a training run on disk: weights, optimizer, random numbers, position."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import TrainingError

_FOLDER = "checkpoint"


def save_checkpoint(
    run: Path, model: nn.Module, optimizer: optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Replaces the run's checkpoint; a kill at any moment leaves the old or the new one.

    Args:
        run: Folder of the run.
        model: Its weights are kept.
        optimizer: Its state is kept.
        progress: Plain values, such as the step and the settings.
    """
    new, old, current = (run / f"{_FOLDER}{suffix}" for suffix in (".new", ".old", ""))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    mx.save_safetensors(str(new / "model.safetensors"), dict(tree_flatten(model.parameters())))
    state = dict(tree_flatten(optimizer.state)) | {"random_state": _random_key()}
    mx.save_safetensors(str(new / "optimizer.safetensors"), state)
    (new / "progress.json").write_text(json.dumps(progress, indent=2) + "\n")
    for file in new.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    if current.exists():
        current.rename(old)
    new.rename(current)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    run: Path, model: nn.Module, optimizer: optim.Optimizer
) -> dict[str, Any] | None:
    """Restores the run's checkpoint in place and returns its progress; `None` if there is none.

    Raises:
        TrainingError: The checkpoint is damaged.
    """
    folder = next((p for p in (run / _FOLDER, run / f"{_FOLDER}.old") if p.exists()), None)
    if folder is None:
        return None
    try:
        model.load_weights(str(folder / "model.safetensors"))
        state = cast(dict[str, mx.array], mx.load(str(folder / "optimizer.safetensors")))
        high, low = cast(list[int], state.pop("random_state").tolist())
        mx.random.seed(high << 32 | low)
        optimizer.state = tree_unflatten(list(state.items()))
        progress: dict[str, Any] = json.loads((folder / "progress.json").read_text())
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise TrainingError(
            f"[train] the checkpoint '{folder}' cannot be read ({error}). Delete it to start over."
        ) from error
    return progress


def _random_key() -> mx.array:
    """The two words of MLX's global random state; `mx.random.seed` of both restores it."""
    key: mx.array = cast(Any, mx.random.state)[0]
    return key
