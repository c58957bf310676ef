"""Makes a dense transformer ternary window by window in several ways, beside training it as a whole.

python examples/calibration.py [--quick] [--output DIR] [--rows NAME ...] [--rates R ...] [--seeds N]
    [--jobs N] [--table-only]

A dense Qwen3 of 12 layers and 128 dims learns from stories and from lines that ask for words they have
named. `mmfree calibrate` then makes it ternary with a hundredth of the tokens that it learned from, and
`mmfree ternarize` with as many. Each row of the first changes one choice of the row `FULL`. The rows in
`BEST` have more seeds.

The folder gets a file for each run, `table.md` and `table.json`. Repeat the command to go on after a
stop: finished runs are not repeated. `--table-only` writes the table of what is there.
"""

import json
import shutil
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from comparisons import student_runs as students
from comparisons.command import parser_of, plan_with, run_comparison
from comparisons.runs import Metrics, found_or_trained, markdown, mean_and_spread
from comparisons.student_training import TRAIN, VALID, prepare

from mlx_mmfree import load, save_model
from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.files.writing import new_file
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.ternary.groups import TernaryScheme, make_ternary
from mlx_mmfree.training.calibrate.calibration import Calibration
from mlx_mmfree.training.calibrate.settings import CalibrateSettings
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.distil.distil import Distillation
from mlx_mmfree.training.distil.settings import TernarizeSettings

DENSE, ROUNDED, CALIBRATED, TRAINED = "dense", "rounded", "calibrated", "trained"


@dataclass(frozen=True)
class Row:
    """A way to make the model ternary.

    Attributes:
        way: What is done.
        options: Settings that differ from the row `FULL`, or from `mmfree ternarize`.
        passes: How often the tokens are read, as a multiple of the plan's.
        tokens: How many there are, as a multiple of the plan's.
        then: Passes of training of the calibrated model.
    """

    way: str
    options: dict[str, Any] = field(default_factory=dict)
    passes: float = 1.0
    tokens: int = 1
    then: float = 0.0


FULL, LONG = "full weights", "full weights, more passes"
AS_OFTEN, AS_OFTEN_LONG = "trained, as many passes", "trained, more passes"
ROWS: dict[str, Row] = {
    DENSE: Row(DENSE),
    "absmean": Row(ROUNDED, {"threshold": 0.5}),
    "threshold 0.7, scale of what is kept": Row(ROUNDED, {"threshold": 0.7, "keeps_mean": False}),
    "modulation alone, hard trits": Row(CALIBRATED, {"rank": 0, "soft": False}),
    "modulation alone": Row(CALIBRATED, {"rank": 0}),
    "rank of 1/32 of the width": Row(CALIBRATED, {"rank": 4}),
    "rank of 1/16 of the width": Row(CALIBRATED, {"rank": 8}),
    "full weights, hard trits": Row(CALIBRATED, {"soft": False}),
    FULL: Row(CALIBRATED),
    "full weights, published start": Row(CALIBRATED, {"start": "mean"}),
    "rank of 1/32, published start": Row(CALIBRATED, {"start": "mean", "rank": 4}),
    "windows of 2": Row(CALIBRATED, {"window": 2}),
    "windows of 4": Row(CALIBRATED, {"window": 4}),
    "windows of 4, moved by 2": Row(CALIBRATED, {"window": 4, "stride": 2}, passes=0.5),
    "last layer dense": Row(CALIBRATED, {"dense_last": 1}),
    LONG: Row(CALIBRATED, passes=4),
    "full weights, then trained": Row(CALIBRATED, then=1),
    "trained, one pass": Row(TRAINED, passes=0.2),
    AS_OFTEN: Row(TRAINED),
    AS_OFTEN_LONG: Row(TRAINED, passes=4),
    "trained, ten times the tokens": Row(TRAINED, passes=0.2, tokens=10),
}
_MEASURED = 60
"""Held-out stories that models are measured on."""

BEST = (FULL, LONG, AS_OFTEN)
"""The rows that have several seeds."""


DEEP = replace(students.MEMORY, layers=12, documents=6000, teacher_steps=1500, teacher_rate=2e-3)
"""A teacher with layers enough to tell windows apart."""


@dataclass(frozen=True)
class Plan:
    """The size of the comparison.

    Attributes:
        teacher: The teacher and its texts.
        share: Tokens as a share of those that the teacher learned from.
        passes: How often they are read.
        rates: Learning rates of rows that train the whole model.
        group_size: Inputs that share a scale.
        seeds: Seeds of the best rows.
        names: The rows.
    """

    teacher: students.Plan = DEEP
    share: float = 0.01
    passes: int = 5
    rates: tuple[float, ...] = (2e-3,)
    group_size: int = 128
    seeds: int = 3
    names: tuple[str, ...] = tuple(ROWS)

    @property
    def samples(self) -> int:
        """Sequences of a length that a hundredth of the teacher's tokens fill."""
        return max(8, round(self.teacher.teacher_steps * self.share * self.teacher.rows))

    @property
    def described(self) -> dict[str, Any]:
        """The settings that all results depend on, as JSON gives it back."""
        own = {"share": self.share, "passes": self.passes, "group_size": self.group_size}
        return {**students.described(self.teacher, students.OF_TEACHER), **own}


QUICK = Plan(
    replace(students.QUICK, dims=64, teacher_steps=20, model_type="qwen3"),
    share=0.1,
    passes=5,
    group_size=64,
    seeds=1,
    names=(DENSE, "absmean", FULL, "last layer dense", AS_OFTEN),
)


@dataclass(frozen=True)
class Run:
    """A row with its learning rate and its seed."""

    row: str
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        words = (self.row, f"{self.rate:g}", str(self.seed))
        return "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words)


def runs_of(plan: Plan) -> list[Run]:
    """The first seed of all rows, then the further seeds of the best."""
    first = [Run(row, rate, 0) for row in plan.names for rate in _rates(plan, row)]
    more = [replace(run, seed=seed) for seed in range(1, plan.seeds) for run in first]
    return first + [run for run in more if run.row in BEST]


def _rates(plan: Plan, row: str) -> tuple[float, ...]:
    return plan.rates if ROWS[row].way == TRAINED else (0.0,)


def compare(plan: Plan, folder: Path, jobs: int, *, trains: bool = True) -> str:
    """Runs the comparison, or only gathers the runs that are finished. Returns its table."""
    home = folder / "runs"
    home.mkdir(parents=True, exist_ok=True)
    if students.known_teacher(plan.teacher, home) is None:
        if not trains:
            return "The dense model has not been trained yet, so that there is no table."
        prepare(plan.teacher, home)
    runs = runs_of(plan)
    for tokens in sorted({ROWS[run.row].tokens for run in runs}) if trains else ():
        _write_share(plan, home, tokens)
    found = found_or_trained(
        runs,
        lambda run: _known(plan, home, run.name),
        partial(learn, plan=plan, folder=home),
        lambda run, metrics: f"{run.name}: {metrics['value']:.4f} bits per byte",
        jobs=jobs,
        trains=trains,
    )
    text = _table(plan, found)
    with new_file(folder / "table.md") as new:
        new.write_text(text + "\n")
    written = [{**asdict(run), **metrics} for run, metrics in found.items()]
    write_json(folder / "table.json", {"runs": written})
    return text


def _known(plan: Plan, folder: Path, name: str) -> Metrics | None:
    """The result of a run, unless it was another plan's."""
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    metrics: Metrics = json.loads(file.read_text())
    return metrics if metrics.pop("settings") == plan.described else None


def _share_file(folder: Path, tokens: int) -> Path:
    return folder / f"share-{tokens}.txt"


def _write_share(plan: Plan, folder: Path, tokens: int) -> None:
    """Writes the first texts of the teacher that fill so many times the samples."""
    file = _share_file(folder, tokens)
    if file.exists():
        return
    _, tokenizer = load(folder / students.TEACHER / "model")
    needed = (plan.samples * tokens + 2) * plan.teacher.length
    texts: list[str] = []
    for text in read_documents(folder / TRAIN):
        texts.append(text)
        needed -= len(tokenizer.encode(text)) + 1
        if needed < 0:
            break
    with new_file(file) as new:
        new.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")


def learn(run: Run, plan: Plan, folder: Path) -> Metrics:
    """Makes the model ternary in a way, measures it and writes down what it came to."""
    row, output = ROWS[run.row], folder / f"{run.name}.run"
    shutil.rmtree(output, ignore_errors=True)
    mx.reset_peak_memory()
    start = time.process_time()
    more: Metrics = {}
    teacher = (folder / students.TEACHER / "model").resolve()
    if row.way == DENSE:
        return _written(plan, run, folder, teacher, {})
    if row.way == ROUNDED:
        _round(plan, row, teacher, output)
    elif row.way == CALIBRATED:
        more = Calibration(_calibration(run, plan, folder, output)).run()["metrics"]
        if row.then:
            first = replace(run, rate=plan.rates[0])
            settings = replace(
                _training(first, plan, folder, output / "then", row.then, 1),
                init_from=str((output / "model").resolve()),
            )
            Distillation(settings).run()
            output = output / "then"
    else:
        settings = _training(run, plan, folder, output, row.passes, row.tokens)
        Distillation(settings).run()
    more |= {"seconds": time.process_time() - start, "peak_bytes": mx.get_peak_memory()}
    metrics = _written(plan, run, folder, output / "model", more)
    shutil.rmtree(folder / f"{run.name}.run", ignore_errors=True)
    return metrics


def _written(plan: Plan, run: Run, folder: Path, model: Path, more: Metrics) -> Metrics:
    """Measures a model, and writes down what it came to."""
    metrics = {"value": _bits_per_byte(plan, model, folder), **more}
    write_json(folder / f"{run.name}.json", {"settings": plan.described, **metrics})
    return metrics


def _round(plan: Plan, row: Row, teacher: Path, output: Path) -> None:
    model, tokenizer = load(teacher)
    for block in model.blocks:
        make_ternary(block, TernaryScheme(group_size=plan.group_size, **row.options))
    pack_linears(model)
    save_model(output / "model", model, tokenizer)


def _calibration(run: Run, plan: Plan, folder: Path, output: Path) -> CalibrateSettings:
    row = ROWS[run.row]
    return CalibrateSettings(
        model=str((folder / students.TEACHER / "model").resolve()),
        output=str(output.resolve()),
        data=(str(_share_file(folder, row.tokens).resolve()),),
        valid=(str((folder / VALID).resolve()),),
        samples=plan.samples,
        sequence_length=plan.teacher.length,
        batch_size=8,
        epochs=max(1, round(plan.passes * row.passes)),
        group_size=plan.group_size,
        seed=run.seed,
        **row.options,
    )


def _training(
    run: Run,
    plan: Plan,
    folder: Path,
    output: Path,
    passes: float,
    tokens: int,
) -> TernarizeSettings:
    rows = plan.teacher.rows
    steps = max(1, round(plan.samples * tokens * plan.passes * passes / rows))
    return TernarizeSettings(
        model=str((folder / students.TEACHER / "model").resolve()),
        output=str(output.resolve()),
        data=(str(_share_file(folder, tokens).resolve()),),
        batch_size=rows,
        sequence_length=plan.teacher.length,
        logits_steps=steps,
        logits_rate=run.rate,
        seed=run.seed,
    )


def _bits_per_byte(plan: Plan, model: Path, folder: Path) -> float:
    loaded, tokenizer = load(model)
    text = "\n".join(islice(read_documents(folder / VALID), _MEASURED))
    ids = tokenizer.encode(text)
    measured = measure_perplexity(loaded, ids, len(text.encode()), length=plan.teacher.length)
    return measured.bits_per_byte


def _table(plan: Plan, found: dict[Run, Metrics]) -> str:
    lines, dense = [], found[Run(DENSE, 0.0)]["value"]
    for name in plan.names:
        row = ROWS[name]
        if row.way == DENSE:
            continue
        for rate in _rates(plan, name):
            runs = [each for run, each in found.items() if (run.row, run.rate) == (name, rate)]
            if not runs:
                continue
            above = [100 * (each["value"] / dense - 1) for each in runs]
            tokens = 0 if row.way == ROUNDED else plan.samples * row.tokens * plan.teacher.length
            passes = f"{plan.passes * row.passes:g}" + (
                f" + {plan.passes * row.then:g}" * bool(row.then)
            )
            seconds = [each["seconds"] for each in runs]
            peak = max(each["peak_bytes"] for each in runs)
            cells = [f"{tokens:,}", passes if tokens else "-", mean_and_spread(above, 2)]
            cells += [f"{sum(seconds) / len(seconds):.0f}", f"{peak / 1e6:.1f}"]
            lines.append([name, *cells])
    header = ["way", "tokens", "passes", "above the dense model, %", "processor s", "peak, MB"]
    return f"The dense model has {dense:.3f} bits per byte.\n\n{markdown(header, lines)}"


def _plan_of(arguments: Namespace) -> Plan:
    plan = plan_with(Plan(), arguments, ("rates", "seeds"))
    return replace(plan, names=(DENSE, *arguments.rows)) if arguments.rows else plan


if __name__ == "__main__":
    parser = parser_of(__doc__, "runs/calibration", "train a tiny teacher and four ternary models")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS)[1:], help="names of rows")
    run_comparison(parser, compare, _plan_of, lambda folder: QUICK)
