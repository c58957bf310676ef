"""The runs of the table of images: what there is to train, and what each run came to."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mmfree import load
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.evaluation.model_tree import model_tree
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.hub import convert, open_checkpoint
from mlx_mmfree.hub.conversion.to_folder import FloatFormats, ternarized
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.image_sets import read_images

from .backbones import BACKBONES, described
from .runs import Metrics

LINEARS = ("dense", "ternary")
TERNARIZED = "ternarized"
"""A dense model whose linears are made ternary, and which then learns on."""

DATA = Path(__file__).parents[1] / "mnist"
_TIMED = 64
_REPEATS = 10


@dataclass(frozen=True)
class Plan:
    """The size of the comparison.

    Attributes:
        backbones: The backbones.
        rates: The learning rates, the likeliest first.
        seeds: Seeds of each row at its best rate.
        steps: Steps of a run.
        recovery_steps: Steps of a model that was made ternary; its strength grows in the first third.
        batch_size: Images in a step.
        data: Folder of the files `train.npz`, `valid.npz` and `test.npz`.
    """

    backbones: tuple[str, ...] = BACKBONES
    rates: tuple[float, ...] = (4e-3, 1.5e-3, 1e-2)
    seeds: int = 3
    steps: int = 800
    recovery_steps: int = 300
    batch_size: int = 64
    data: Path = DATA


QUICK = Plan(
    backbones=("PoolFormer",), rates=(4e-3,), seeds=1, steps=2, recovery_steps=3, batch_size=2
)


@dataclass(frozen=True)
class Row:
    """A backbone with one kind of linears."""

    backbone: str
    linear: str


@dataclass(frozen=True)
class Run:
    row: Row
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        words = (self.row.backbone, self.row.linear, f"{self.rate:g}", str(self.seed))
        return "-".join(words).lower()


def small_data(folder: Path, count: int) -> Path:
    """A folder with a few images of each file."""
    for file in DATA.glob("*.npz"):
        with np.load(file) as arrays:
            few = {name: arrays[name][:count] for name in arrays}
        np.savez(folder / file.name, **few)
    return folder


def rows_of(plan: Plan) -> list[Row]:
    """The rows that are trained from random weights, in the order in which they are tried."""
    return [Row(backbone, linear) for backbone in plan.backbones for linear in LINEARS]


def settings_of(run: Run, plan: Plan) -> dict[str, Any]:
    """The settings that a result depends on, as JSON gives them back."""
    names = ("steps", "recovery_steps", "batch_size")
    settings = {
        **asdict(run),
        **{name: getattr(plan, name) for name in names},
        "data": plan.data.name,
        "model": described(run.row.backbone, "dense"),
    }
    return dict(json.loads(json.dumps(settings)))


def train(run: Run, plan: Plan, folder: Path) -> Metrics:
    """Trains a run, measures it and writes down what it came to."""
    return _written(run, plan, folder, {}, {"model": described(run.row.backbone, run.row.linear)})


def recover(run: Run, plan: Plan, folder: Path, *, dense: Run) -> Metrics:
    """Makes the model of a dense run ternary, measures it, and trains it further."""
    start = folder / f"{run.name}.start"
    if start.exists():
        shutil.rmtree(start)
    source = ternarized(open_checkpoint(folder / f"{dense.name}.run" / "model"))
    convert(source, start, to="hf", formats=FloatFormats(keep_masters=True))
    before = {"at_once": _accuracy(start, plan)}
    values = {
        "init_from": str(start.resolve()),
        "steps": plan.recovery_steps,
        "warmup_steps": plan.recovery_steps // 10,
        "quantization_warmup": plan.recovery_steps // 3,
    }
    metrics = _written(run, plan, folder, before, values)
    shutil.rmtree(start)
    return metrics


def _written(
    run: Run, plan: Plan, folder: Path, metrics: Metrics, values: Mapping[str, Any]
) -> Metrics:
    output = (folder / f"{run.name}.run").resolve()
    given: dict[str, Any] = {
        "output": str(output),
        "stages": (Stage(1, {"train.npz": 1}),),
        "valid": ("valid.npz", "test.npz"),
        "order": "epochs",
        "steps": plan.steps,
        "batch_size": plan.batch_size,
        "learning_rate": run.rate,
        "warmup_steps": plan.steps // 10,
        "weight_decay": 0.05,
        "steps_per_eval": max(1, plan.steps // 3),
        "seed": run.seed,
        "root": plan.data,
    }
    metrics = {"value": None, **metrics}
    try:
        held_out = train_model(Settings(**{**given, **values}))["held_out"]
    except TrainingError as error:
        metrics["failure"] = str(error)
    else:
        metrics |= {"value": held_out["test/accuracy"], "held_out": held_out}
        metrics |= _sizes_and_speed(output / "model", plan)
    for name in ("checkpoint", "best.safetensors"):
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    write_json(folder / f"{run.name}.json", {"settings": settings_of(run, plan), **metrics})
    return metrics


def _accuracy(model_folder: Path, plan: Plan) -> float:
    """The share of the test images that a model gets right."""
    model, processor = load(model_folder)
    samples = read_images(plan.data / "test.npz", model.config.labels, model.num_logits)
    right = 0
    for first in range(0, len(samples), _TIMED):
        part = samples[first : first + _TIMED]
        found = mx.argmax(model(processor([each.picture for each in part])), axis=-1)
        right += int((np.array(found) == [each.label for each in part]).sum())
    return right / len(samples)


def _sizes_and_speed(model_folder: Path, plan: Plan) -> Metrics:
    """Of a finished model; its speed comes from the fastest batch, which others disturb least."""
    model, _ = load(model_folder)
    tree = model_tree(model)
    images = mx.random.normal((_TIMED, *model.config.image_size, model.config.input_channels))
    mx.eval(model(images))
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        mx.eval(model(images))
        seconds.append(time.perf_counter() - start)
    return {
        "parameters": tree.parameters,
        "bits_per_weight": 8 * tree.nbytes / tree.parameters,
        "images_per_second": _TIMED / min(seconds),
    }


def finished(run: Run, plan: Plan, folder: Path) -> Metrics | None:
    """The result of a finished run, unless it was another plan's."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        return None
    metrics: Metrics = json.loads(file.read_text())
    return metrics if metrics.pop("settings") == settings_of(run, plan) else None


def best_runs(plan: Plan, tried: Mapping[Run, Metrics]) -> dict[Row, Run]:
    """For each row the run with the best rate, by the accuracy on the images for validation."""
    best: dict[Row, Run] = {}
    for run, metrics in tried.items():
        if metrics["value"] is None:
            continue
        other = best.setdefault(run.row, run)
        if _valid(metrics) > _valid(tried[other]):
            best[run.row] = run
    return {row: best[row] for row in rows_of(plan) if row in best}


def _valid(metrics: Metrics) -> float:
    return float(metrics["held_out"]["valid/accuracy"])


def recoveries(best: Mapping[Row, Run], results: Mapping[Run, Metrics]) -> dict[Run, Run]:
    """The runs that make finished dense ones ternary, at the rate of ternary ones, and their sources."""
    found = {}
    for row, run in best.items():
        ternary = best.get(Row(row.backbone, "ternary"))
        if row.linear != "dense" or ternary is None:
            continue
        for dense in results:
            if replace(dense, seed=run.seed) == run and results[dense]["value"] is not None:
                found[Run(Row(row.backbone, TERNARIZED), ternary.rate, dense.seed)] = dense
    return found
