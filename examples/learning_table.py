"""Trains every causal token mixer at equal size on recall, copying, induction and text; writes a table.

python examples/learning_table.py [--quick] [--output DIR] [--mixers NAME ...] [--tasks NAME ...]
    [--linears KIND ...] [--rates R ...] [--seeds N] [--jobs N] [--table-only]

Each model has 2 blocks of 64 dims and about as many parameters as the one with multi-head attention: the
channel mixer makes up for what the token mixer has more or less. Queries and keys are rotated where a
mixer takes a rotation; a mixer that cannot tell the order of tokens gets learned positions, and one that
can gets none. All learn from the same batches, with dense and with ternary linears. The learning
rate of each row and task is the best of `--rates` with the first seed. A generated task counts only if
softmax attention gives 99 % of its answers.

Three ablations learn the characters too: a ternary MatMul-free model without some part of it, softmax
attention with other codes of positions, and attention to a window with and without sinks, on a text far
longer than those it learned from.

The folder gets a file for each run, `table.md`, `table.json` and `table.png` (extra `plot`). Repeat the
command to go on after a stop: finished runs are not repeated. `--table-only` writes the table of what is
there. examples/README.md shows the results.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from comparisons.command import parser_of, plan_with, run_comparison
from comparisons.learning_report import write_report
from comparisons.learning_runs import (
    ABLATIONS,
    LINEARS,
    QUICK,
    TASKS,
    Plan,
    Run,
    best_runs,
    finished,
    rows_of,
    train,
    turn,
)
from comparisons.models import causal_mixers
from comparisons.runs import Metrics, found_or_trained


def compare(plan: Plan, folder: Path, jobs: int, *, trains: bool = True) -> str:
    """Runs the comparison, or only gathers the runs that are finished. Returns its tables."""
    home = folder / "runs"
    home.mkdir(parents=True, exist_ok=True)

    def results(runs: Sequence[Run]) -> dict[Run, Metrics]:
        known = partial(finished, plan=plan, folder=home)
        learn = partial(train, plan=plan, folder=home)
        return found_or_trained(runs, known, learn, _line, jobs=jobs, trains=trains)

    search = [Run(row, rate) for row in rows_of(plan) for rate in plan.rates]
    search.sort(key=lambda run: turn(run, plan))
    tried = results(search)
    best = best_runs(plan, tried)
    seeds = [replace(run, seed=seed) for seed in range(1, plan.seeds) for run in best]
    return write_report(folder, plan, best, tried | results(seeds))


def _line(run: Run, metrics: Metrics) -> str:
    value = metrics["value"]
    return f"{run.name}: {metrics['failure'] if value is None else f'{value:.3f}'}"


def _plan_of(arguments: Namespace) -> Plan:
    plan = plan_with(Plan(), arguments, ("mixers", "linears", "rates", "seeds"))
    if not arguments.tasks:
        return plan
    return replace(
        plan,
        tasks=tuple(task for task in TASKS if task.name in arguments.tasks),
        ablations=tuple(name for name in ABLATIONS if name in arguments.tasks),
    )


if __name__ == "__main__":
    parser = parser_of(__doc__, "runs/learning_table", "train few models for two steps")
    parser.add_argument("--mixers", nargs="+", choices=causal_mixers(), help="mixers of the table")
    tasks = [task.name for task in TASKS]
    parser.add_argument(
        "--tasks", nargs="+", choices=[*tasks, *ABLATIONS], help="tasks and ablations (all)"
    )
    parser.add_argument(
        "--linears", nargs="+", choices=LINEARS, help="linears of the table (dense ternary)"
    )
    run_comparison(parser, compare, _plan_of, lambda folder: QUICK)
