"""Turns a transformer into models without attention, and compares them with twins from scratch.

python examples/without_attention.py [--quick] [--output DIR] [--kinds NAME ...] [--rates R ...]
    [--seeds N] [--jobs N] [--table-only] [--memory]

The teacher is a small Llama, which learns from ten times the tokens of its students: stories, and lines
that ask for words they have named before. A student learns by the stages of `mmfree distil`. A twin has
its shape and learns from the text alone, once for the same tokens and once for the same processor time.
The learning rate of students and of twins is the best of `--rates` with the first seed. Of one student,
each stage is left out in turn. With `--memory`, most texts are such lines, so that the teacher recalls,
and what its students keep of that is compared; there are no twins.

The folder gets a file for each run, `table.md`, `table.json` and `table.png` (extra `plot`). Repeat the
command to go on after a stop: finished runs are not repeated. `--table-only` writes the table of what is
there.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from comparisons.command import parser_of, plan_with, run_comparison
from comparisons.runs import Metrics, found_or_trained
from comparisons.student_report import write_report
from comparisons.student_runs import (
    DISTILLED,
    KINDS,
    MEMORY,
    QUICK,
    Plan,
    Run,
    best_rates,
    final_runs,
    finished,
    known_teacher,
    longer_twins,
    searches,
)
from comparisons.student_training import learn, prepare, recall_before


def compare(plan: Plan, folder: Path, jobs: int, *, trains: bool = True) -> str:
    """Runs the comparison, or only gathers the runs that are finished. Returns its tables."""
    home = folder / "runs"
    home.mkdir(parents=True, exist_ok=True)
    teacher = known_teacher(plan, home)
    if teacher is None:
        if not trains:
            return "The teacher has not been trained yet, so that there is no table."
        teacher = prepare(plan, home)

    def results(runs: Sequence[Run], longer: dict[Run, int]) -> dict[Run, Metrics]:
        known = partial(finished, plan=plan, folder=home, longer=longer)
        train = partial(learn, plan=plan, folder=home, longer=longer)
        return found_or_trained(runs, known, train, _line, jobs=jobs, trains=trains)

    found = results(searches(plan), {})
    rates = best_rates(found)
    found |= results(final_runs(plan, rates), {})
    chosen = {run: value for run, value in found.items() if _is_best(run, rates)}
    longer = longer_twins(plan, chosen)
    found |= results(list(longer), longer)
    for run, metrics in found.items():
        if run.way == DISTILLED:
            metrics["recall_before"] = recall_before(run.kind, run.seed, home)
    return write_report(folder, plan, teacher, rates, found)


def _is_best(run: Run, rates: dict[tuple[str, str], float]) -> bool:
    return rates.get((run.kind, run.way)) == run.rate


def _line(run: Run, metrics: Metrics) -> str:
    value = metrics["value"]
    return f"{run.name}: {metrics['failure'] if value is None else f'{value:.3f}'}"


def _plan_of(arguments: Namespace) -> Plan:
    plan = MEMORY if arguments.memory else Plan()
    return plan_with(plan, arguments, ("kinds", "rates", "seeds"))


if __name__ == "__main__":
    parser = parser_of(__doc__, "runs/without_attention", "train one kind for a few steps")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="kinds of students")
    parser.add_argument("--memory", action="store_true", help="a teacher that recalls; no twins")
    run_comparison(parser, compare, _plan_of, lambda folder: QUICK)
