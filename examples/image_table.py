"""Trains every backbone of images at tiny size on handwritten digits, dense and ternary; writes a table.

python examples/image_table.py [--quick] [--output DIR] [--backbones NAME ...] [--rates R ...]
    [--seeds N] [--jobs N] [--data DIR] [--table-only]

Each model learns with `mmfree train` from 10,000 images of MNIST, which lie in examples/mnist, scaled to
32 by 32 pixels. The learning rate of each row is the best of `--rates` with the first seed, by other
images than the test's. The dense models are then made ternary as `mmfree convert --ternarize`
makes them, tested at once, and trained further with quantisation that sets in slowly.

The folder gets a file for each run, `table.md`, `table.json` and `table.png` (extra `plot`). Repeat the
command to go on after a stop: finished runs are not repeated, and one that was stopped goes on.
`--table-only` writes the table of what is there. Pillow is needed (extra `vision`). All runs take about
two hours of one core.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from comparisons.backbones import BACKBONES
from comparisons.command import parser_of, plan_with, run_comparison
from comparisons.image_report import write_report
from comparisons.image_runs import (
    QUICK,
    Plan,
    Run,
    best_runs,
    finished,
    recover,
    recoveries,
    rows_of,
    small_data,
    train,
)
from comparisons.runs import Metrics, found_or_trained


def compare(plan: Plan, folder: Path, jobs: int, *, trains: bool = True) -> str:
    """Runs the comparison, or only gathers the runs that are finished. Returns its tables."""
    home = folder / "runs"
    home.mkdir(parents=True, exist_ok=True)
    known = partial(finished, plan=plan, folder=home)

    def results(runs: Sequence[Run], learn: Callable[[Run], Metrics]) -> dict[Run, Metrics]:
        return found_or_trained(runs, known, learn, _line, jobs=jobs, trains=trains)

    learn = partial(train, plan=plan, folder=home)
    found = results([Run(row, rate) for rate in plan.rates for row in rows_of(plan)], learn)
    best = best_runs(plan, found)
    seeds = range(1, plan.seeds)
    found |= results([replace(run, seed=seed) for seed in seeds for run in best.values()], learn)
    sources = recoveries(best, found)
    found |= results(list(sources), partial(_recover, plan=plan, folder=home, sources=sources))
    return write_report(folder, plan, best, found)


def _recover(run: Run, plan: Plan, folder: Path, sources: dict[Run, Run]) -> Metrics:
    return recover(run, plan, folder, dense=sources[run])


def _line(run: Run, metrics: Metrics) -> str:
    value = metrics["value"]
    return f"{run.name}: {metrics['failure'] if value is None else f'{value:.2%} right'}"


def _plan_of(arguments: Namespace) -> Plan:
    return plan_with(Plan(), arguments, ("backbones", "rates", "seeds", "data"))


def _quick(folder: Path) -> Plan:
    return replace(QUICK, data=small_data(folder, 40))


if __name__ == "__main__":
    parser = parser_of(__doc__, "runs/image_table", "train one backbone for two steps")
    parser.add_argument("--backbones", nargs="+", choices=BACKBONES, help="backbones of the table")
    parser.add_argument(
        "--data",
        type=lambda name: Path(name).resolve(),
        help="folder with train.npz, valid.npz and test.npz, of one channel (examples/mnist)",
    )
    run_comparison(parser, compare, _plan_of, _quick)
