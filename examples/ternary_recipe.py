"""Makes a dense model ternary in several ways, and says what each costs in bits per byte and in recall.

python examples/ternary_recipe.py [--quick] [--output DIR] [--rows NAME ...] [--rates R ...] [--seeds N]
    [--jobs N] [--table-only]

A dense Qwen3 of 4 layers and 128 dims learns from stories and from lines that ask for words they have
named. `mmfree ternarize` then makes it ternary with a tenth of the tokens that it learned from. Each row
changes one choice of the first row, with the first seed. The rows in `BEST` have more seeds, and fewer
tokens too; the defaults of the command are the second of them. One row learns from random weights and
the text alone.

The folder gets a file for each run, `table.md` and `table.json`. Repeat the command to go on after a
stop: finished runs are not repeated. `--table-only` writes the table of what is there.
"""

import json
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from comparisons import student_runs as students
from comparisons.command import parser_of, plan_with, run_comparison
from comparisons.runs import Metrics, found_or_trained, markdown, mean_and_spread
from comparisons.student_training import TRAIN, VALID, Timer, measured, prepare, trained

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.files.writing import new_file
from mlx_mmfree.training.distil.distil import Distillation
from mlx_mmfree.training.distil.settings import TernarizeSettings

FIRST, SCRATCH = "groups of 64", "from random weights"
TOGETHER = "the five best choices together"
EVERYWHERE = "mlx-lm, llama.cpp"
BITNET = "transformers, mlx-lm"
_FIRST: dict[str, Any] = {
    "threshold": 0.5,
    "scale_of_kept": False,
    "quantization_warmup": 0.5,
    "teacher_weight": 1.0,
    "final_learning_rate": 0.1,
}
_TOGETHER = {
    "threshold": 0.7,
    "scale_of_kept": True,
    "quantization_warmup": 0,
    "teacher_weight": 4.0,
    "final_learning_rate": 0.0,
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    FIRST: (EVERYWHERE, {}),
    "a scale for each row": (EVERYWHERE, {"scales": "row"}),
    "a scale for each matrix": (EVERYWHERE, {"scales": "tensor"}),
    "8-bit activations": (BITNET, {"scales": "bitnet"}),
    "8-bit activations, inner norms": ("this library", {"scales": "bitnet", "inner_norms": True}),
    "scale of what is kept": (EVERYWHERE, {"scale_of_kept": True}),
    "threshold 0.7, scale of what is kept": (EVERYWHERE, {"threshold": 0.7, "scale_of_kept": True}),
    "quantised from the first step": (EVERYWHERE, {"quantization_warmup": 0}),
    "quantised bit by bit to the end": (EVERYWHERE, {"quantization_warmup": 1.0}),
    "divergence of weight 4": (EVERYWHERE, {"teacher_weight": 4.0}),
    "temperature 2": (EVERYWHERE, {"teacher_temperature": 2.0}),
    "text alone": (EVERYWHERE, {"logits_steps": 0}),
    "a rate that falls to zero": (EVERYWHERE, {"final_learning_rate": 0.0}),
    TOGETHER: (EVERYWHERE, _TOGETHER),
    "rotation of 64": ("this library", {"rotation": 64}),
    "embedding and head stay": (EVERYWHERE, {"keep_embedding": True}),
    SCRATCH: (BITNET, {}),
}
"""Each choice: where its model opens, and the settings that differ from `_FIRST`."""
BEST = (FIRST, TOGETHER)
"""The rows that have several seeds and shares of the tokens."""


@dataclass(frozen=True)
class Plan:
    """The size of the comparison.

    Attributes:
        teacher: The teacher and its texts, as in the comparison of students that keep what they recall.
        rates: Learning rates of each row.
        seeds: Seeds of the best rows.
        shares: Tokens of a run as shares of the teacher's; only the best rows have all but the last.
        names: The rows.
    """

    teacher: students.Plan = students.MEMORY
    rates: tuple[float, ...] = (1e-3, 4e-3)
    seeds: int = 3
    shares: tuple[float, ...] = (0.01, 0.03, 0.1)
    names: tuple[str, ...] = tuple(ROWS)

    @property
    def described(self) -> dict[str, Any]:
        """The settings that all results depend on, as JSON gives it back."""
        return students.described(self.teacher, students.OF_TEACHER)


QUICK = Plan(
    replace(students.QUICK, dims=64, teacher_steps=20, model_type="qwen3"),
    rates=(1e-3,),
    seeds=1,
    shares=(0.1,),
    names=(FIRST, "8-bit activations"),
)


@dataclass(frozen=True)
class Run:
    """A row at a share of the tokens, with its learning rate and its seed."""

    row: str
    share: float
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        words = (self.row, f"{self.share:g}", f"{self.rate:g}", str(self.seed))
        return "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words)


def first_runs(plan: Plan) -> list[Run]:
    """All rows at the largest share, and the best ones at all, at each rate with the first seed."""
    shares = [(row, share) for row in plan.names for share in plan.shares if _has(plan, row, share)]
    return [Run(row, share, rate) for rate in plan.rates for row, share in shares]


def _has(plan: Plan, row: str, share: float) -> bool:
    return row in BEST or share == plan.shares[-1]


def best_rates(found: dict[Run, Metrics]) -> dict[tuple[str, float], float]:
    """The rate with the fewest bits per byte of each row and share."""
    known = {
        run: metrics["value"] for run, metrics in found.items() if metrics["value"] is not None
    }
    best: dict[tuple[str, float], Run] = {}
    for run, value in known.items():
        other = best.setdefault((run.row, run.share), run)
        if value < known[other]:
            best[run.row, run.share] = run
    return {key: run.rate for key, run in best.items()}


def compare(plan: Plan, folder: Path, jobs: int, *, trains: bool = True) -> str:
    """Runs the comparison, or only gathers the runs that are finished. Returns its table."""
    home = folder / "runs"
    home.mkdir(parents=True, exist_ok=True)
    teacher = students.known_teacher(plan.teacher, home)
    if teacher is None:
        if not trains:
            return "The teacher has not been trained yet, so that there is no table."
        teacher = prepare(plan.teacher, home)

    def results(runs: Sequence[Run]) -> dict[Run, Metrics]:
        return found_or_trained(
            runs,
            lambda run: _known(plan, home, run.name),
            partial(learn, plan=plan, folder=home),
            _line,
            jobs=jobs,
            trains=trains,
        )

    found = results(first_runs(plan))
    rates = best_rates(found)
    others = [Run(*key, rate, n) for key, rate in rates.items() for n in range(1, plan.seeds)]
    found |= results([run for run in others if run.row in BEST])
    text = _table(plan, teacher, found, rates)
    with new_file(folder / "table.md") as new:
        new.write_text(text + "\n")
    runs = [{**asdict(run), **metrics} for run, metrics in found.items()]
    write_json(folder / "table.json", {"teacher": teacher, "runs": runs})
    return text


def _known(plan: Plan, folder: Path, name: str) -> Metrics | None:
    """The result of the teacher or a run, unless it was another plan's."""
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    metrics: Metrics = json.loads(file.read_text())
    return metrics if metrics.pop("settings") == plan.described else None


def learn(run: Run, plan: Plan, folder: Path) -> Metrics:
    """Trains a run, measures it and writes down what it came to."""
    output = folder / f"{run.name}.run"
    steps = max(2, round(plan.teacher.teacher_steps * run.share))
    try:
        if run.row == SCRATCH:
            metrics = _from_scratch(run, plan, folder, output, steps)
        else:
            metrics = _ternarized(run, plan, folder, output, steps)
    except TrainingError as error:
        metrics = {"value": None, "failure": str(error)}
    shutil.rmtree(output, ignore_errors=True)
    settings = {"settings": plan.described}
    write_json(folder / f"{run.name}.json", {**settings, **metrics})
    return metrics


def _from_scratch(run: Run, plan: Plan, folder: Path, output: Path, steps: int) -> Metrics:
    model = json.loads((folder / students.TEACHER / "model" / "config.json").read_text())
    model["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    model["quantization_config"] |= {"quantization_mode": "online"}
    known = {key: value for key, value in model.items() if key != "mlx_mmfree"}
    return trained(plan.teacher, folder, output, steps, run.rate, run.seed, {"model": known})


def _ternarized(run: Run, plan: Plan, folder: Path, output: Path, steps: int) -> Metrics:
    options = _FIRST | ROWS[run.row][1]
    if options.get("scales") == "bitnet":
        # which has a threshold of its own
        del options["threshold"], options["scale_of_kept"]
    stage = "text" if options.get("logits_steps") == 0 else "logits"
    warmup = 0 if stage == "text" else options["quantization_warmup"]
    options["quantization_warmup"] = int(steps * warmup)
    settings = TernarizeSettings(
        model=str((folder / students.TEACHER / "model").resolve()),
        output=str(output.resolve()),
        data=(str((folder / TRAIN).resolve()),),
        valid=(str((folder / VALID).resolve()),),
        batch_size=plan.teacher.rows,
        sequence_length=plan.teacher.length,
        valid_tokens=plan.teacher.valid_tokens,
        seed=run.seed,
        **{"logits_rate": run.rate, "text_rate": run.rate, **options, f"{stage}_steps": steps},
    )
    timer = Timer()
    report = Distillation(settings).run([timer])
    return {**measured(plan.teacher, output, folder, timer.seconds), "stages": report["metrics"]}


def _line(run: Run, metrics: Metrics) -> str:
    value = metrics["value"]
    return f"{run.name}: {metrics['failure'] if value is None else f'{value:.3f}'}"


def _table(
    plan: Plan, teacher: Metrics, found: dict[Run, Metrics], rates: dict[tuple[str, float], float]
) -> str:
    lines = []
    for row in plan.names:
        for share in plan.shares if row in BEST else plan.shares[-1:]:
            rate = rates.get((row, share))
            runs = [
                metrics
                for run, metrics in found.items()
                if (run.row, run.share, run.rate) == (row, share, rate)
                and metrics["value"] is not None
            ]
            if rate is None or not runs:
                continue
            values = [metrics["value"] for metrics in runs]
            above = [100 * (value / teacher["value"] - 1) for value in values]
            recall = [100 * metrics["recall"] for metrics in runs]
            cells = [mean_and_spread(values), mean_and_spread(above, 1), mean_and_spread(recall, 1)]
            lines.append([row, f"{share:.0%}", f"{rate:g}", *cells, ROWS[row][0]])
    header = ["way", "tokens of the teacher's", "rate", "bits per byte", "above the teacher, %"]
    table = markdown([*header, "recall, %", "opens in"], lines)
    return (
        f"The teacher has {teacher['value']:.3f} bits per byte and recalls {teacher['recall']:.1%} of "
        f"the answers.\n\n{table}"
    )


def _plan_of(arguments: Namespace) -> Plan:
    plan = plan_with(Plan(), arguments, ("rates", "seeds"))
    return replace(plan, names=tuple(arguments.rows)) if arguments.rows else plan


if __name__ == "__main__":
    parser = parser_of(
        __doc__, "runs/ternary_recipe", "train a tiny teacher and two ternary models"
    )
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), help="names of rows")
    run_comparison(parser, compare, _plan_of, lambda folder: QUICK)
