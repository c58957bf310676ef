"""The runs of the learning table: what there is to train, and what each run came to."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.files.reading import write_json

from .learner import accuracy, bits_per_character, learn
from .models import (
    HYBRID_FORMATS,
    LAYERS,
    MLGRU_FORMATS,
    OPTIONS,
    POSITION_FORMATS,
    REFERENCE,
    SINK_FORMATS,
    SIZES,
    causal_mixers,
    metaformer,
    mlgru_format,
    positions_of,
)
from .runs import Metrics
from .tasks import Task

TASKS = (
    Task("characters", vocab_size=256, length=128, batch_size=8, steps=1000),
    Task("shifted recall", vocab_size=64, length=31, count=8, is_shifted=True, steps=800),
    Task("recall", vocab_size=64, length=31, count=8, steps=1200),
    Task("copying", vocab_size=32, length=48, steps=500),
    Task("induction", vocab_size=32, length=63, count=6, steps=800),
)
LINEARS = ("dense", "ternary")
ABLATIONS = ("MLGRU", "positions", "sinks", "hybrids")
_TASKS_OF_HYBRIDS = ("characters", "recall")


@dataclass(frozen=True)
class Plan:
    """The size of the comparison.

    Attributes:
        tasks: The tasks. The ablations learn characters in any case, and hybrids recall too.
        ablations: Those to run.
        mixers: The mixers of the table.
        linears: Kinds of their linears.
        rates: The learning rates, the likeliest first.
        seeds: Seeds of each row at its best rate.
        held_out_batches: Batches that accuracy is measured on.
        stories: Held-out stories.
        long_text: Bytes of the long text.
    """

    tasks: tuple[Task, ...] = TASKS
    ablations: tuple[str, ...] = ABLATIONS
    mixers: tuple[str, ...] = tuple(causal_mixers())
    linears: tuple[str, ...] = LINEARS
    rates: tuple[float, ...] = (3e-3, 1e-2)
    seeds: int = 3
    held_out_batches: int = 32
    stories: int = 80
    long_text: int = 16384


QUICK = Plan(
    tasks=tuple(replace(task, steps=2, batch_size=2) for task in TASKS[:2]),
    mixers=("multi_head_attention",),
    rates=(3e-3,),
    seeds=1,
    held_out_batches=1,
    stories=1,
    long_text=400,
)


@dataclass(frozen=True)
class Row:
    """A model on a task: one value of the report.

    Attributes:
        part: "table" or one of `ABLATIONS`.
        task: The task.
        model: Name of the mixer or of the format.
        linear: Kind of the linears.
    """

    part: str
    task: Task
    model: str
    linear: str


@dataclass(frozen=True)
class Run:
    row: Row
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        row = self.row
        words = (row.part, row.task.name, row.model, row.linear, f"{self.rate:g}", str(self.seed))
        return "-".join(words).lower().replace(" ", "_")


def rows_of(plan: Plan) -> list[Row]:
    """All rows, in the order in which they are tried."""
    table = {
        linear: [Row("table", task, mixer, linear) for task in plan.tasks for mixer in plan.mixers]
        for linear in plan.linears
    }
    text = next((task for task in plan.tasks if not task.is_generated), TASKS[0])
    others = []
    if "MLGRU" in plan.ablations:
        others += [Row("MLGRU", text, format, "ternary") for format in MLGRU_FORMATS]
    if "positions" in plan.ablations:
        others += [Row("positions", text, format, "dense") for format in POSITION_FORMATS]
    if "sinks" in plan.ablations:
        others += [Row("sinks", text, format, "dense") for format in SINK_FORMATS]
    if "hybrids" in plan.ablations:
        tasks = [task for task in plan.tasks or TASKS if task.name in _TASKS_OF_HYBRIDS]
        others += [
            Row("hybrids", task, format, linear)
            for linear in plan.linears
            for task in tasks
            for format in HYBRID_FORMATS
        ]
    return [*table.get("dense", ()), *others, *table.get("ternary", ())]


def settings_of(run: Run, plan: Plan) -> dict[str, Any]:
    """The settings that a result depends on, as JSON gives them back."""
    formats: dict[str, Mapping[str, Any]] = {
        "table": OPTIONS,
        "MLGRU": MLGRU_FORMATS,
        "positions": POSITION_FORMATS,
        "sinks": SINK_FORMATS,
        "hybrids": HYBRID_FORMATS,
    }
    row = run.row
    settings = {
        **asdict(run),
        "model": {**SIZES, "format": formats[row.part].get(row.model)},
        "positions": positions_of(row.model) if row.part == "table" else None,
        "batches": plan.held_out_batches,
        "stories": plan.stories,
        "long_text": plan.long_text,
    }
    return dict(json.loads(json.dumps(settings)))


def train(run: Run, plan: Plan, folder: Path) -> Metrics:
    """Trains a run, measures it and writes down what it came to."""
    row, task = run.row, run.row.task
    if row.part == "MLGRU":
        model = mlgru_format(task, run.seed, **MLGRU_FORMATS[row.model])
    elif row.part == "positions":
        format = POSITION_FORMATS[row.model]
        model = metaformer([{"name": REFERENCE}], task, run.seed, **format)
    elif row.part == "sinks":
        model = metaformer([SINK_FORMATS[row.model][0]], task, run.seed)
    else:
        names = HYBRID_FORMATS[row.model] if row.part == "hybrids" else (row.model,)
        mixers = [{"name": name} for name in names]
        layers = max(len(names), LAYERS)
        model = metaformer(mixers, task, run.seed, layers, linear_class=row.linear)
    metrics: Metrics = {"value": None}
    try:
        metrics |= learn(model, task, run.rate, run.seed)
    except TrainingError as error:
        metrics["failure"] = str(error)
    else:
        if task.is_generated:
            metrics["value"] = accuracy(model, task, plan.held_out_batches)
        else:
            metrics["value"] = bits_per_character(model, task.length, plan.stories)
    if row.part == "sinks" and metrics["value"] is not None:
        metrics["long"] = {}
        for name, mixer in SINK_FORMATS[row.model][1].items():
            reader = metaformer([mixer], task, run.seed, max_position_embeddings=plan.long_text)
            reader.update(model.parameters())
            metrics["long"][name] = bits_per_character(
                reader, task.length, plan.stories, carries_state=True, most=plan.long_text
            )
    write_json(folder / f"{run.name}.json", {"settings": settings_of(run, plan), **metrics})
    return metrics


def finished(run: Run, plan: Plan, folder: Path) -> Metrics | None:
    """The result of a finished run, unless it was another plan's."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        return None
    metrics = dict(json.loads(file.read_text()))
    return metrics if metrics.pop("settings") == settings_of(run, plan) else None


def best_runs(plan: Plan, tried: dict[Run, Metrics]) -> list[Run]:
    """The run with the best rate of each row of which any run has come to a value."""
    best: dict[Row, Run] = {}
    for run, metrics in tried.items():
        if metrics["value"] is None:
            continue
        other = best.setdefault(run.row, run)
        sign = 1 if run.row.task.is_generated else -1
        if sign * metrics["value"] > sign * tried[other]["value"]:
            best[run.row] = run
    return [best[row] for row in rows_of(plan) if row in best]


def turn(run: Run, plan: Plan) -> tuple[bool, bool]:
    """Every row comes with the likeliest rate first, then the dense ones with the others."""
    is_likeliest = run.rate == plan.rates[0]
    return not is_likeliest, not is_likeliest and run.row.linear == "ternary"
