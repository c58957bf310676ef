"""The command line that comparisons of many runs share."""

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

Plan = TypeVar("Plan")


def parser_of(description: str | None, output: str, quick: str) -> ArgumentParser:
    """A parser of where the runs go, how many there are, and how many at a time.

    Args:
        description: What the program does; only its first line is shown.
        output: The folder of all runs, unless told otherwise.
        quick: What `--quick` does.
    """
    parser = ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=Path(output), help="folder of all runs")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates, the likeliest first"
    )
    parser.add_argument("--seeds", type=int, help="number of seeds (3)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time (1)")
    parser.add_argument(
        "--table-only", action="store_true", help="train nothing: write the table of finished runs"
    )
    return parser


def plan_with(plan: Plan, arguments: Namespace, names: Sequence[str]) -> Plan:
    """The plan with the values of these flags, where they are given."""
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    changed: Any = plan
    return replace(changed, **{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})


def run_comparison(
    parser: ArgumentParser,
    compare: Callable[..., str],
    plan_of: Callable[[Namespace], Plan],
    quick: Callable[[Path], Plan],
) -> None:
    """Reads the command line and prints the tables.

    Args:
        parser: The result of `parser_of`, with further flags.
        compare: Runs a plan in a folder with so many jobs, or with `trains=False` only gathers the
            finished runs. Returns the tables.
        plan_of: The plan that the flags ask for.
        quick: The plan of `--quick`, whose runs lie in the folder.
    """
    arguments = parser.parse_args()
    # of the processes that train
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(quick(Path(folder)), Path(folder), arguments.jobs))
        return
    plan = plan_of(arguments)
    try:
        print(compare(plan, arguments.output, arguments.jobs, trains=not arguments.table_only))
    except KeyboardInterrupt:
        parser.exit(130, "The runs were stopped. Repeat the command to go on.\n")
