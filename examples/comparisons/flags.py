"""The flags that commands of many runs share."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

Plan = TypeVar("Plan")


def plan_with(plan: Plan, arguments: Namespace, names: Sequence[str]) -> Plan:
    """The plan with the values of these flags, where they are given."""
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    changed: Any = plan
    return replace(changed, **{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})


def add_flags_of_runs(parser: ArgumentParser, output: str) -> None:
    """Adds where the runs go, how many there are, and how many at a time.

    Args:
        parser: Takes the flags.
        output: The folder of all runs, unless told otherwise.
    """
    parser.add_argument("--output", type=Path, default=Path(output), help="folder of all runs")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates, the likeliest first"
    )
    parser.add_argument("--seeds", type=int, help="number of seeds (3)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time (1)")
    parser.add_argument(
        "--table-only", action="store_true", help="train nothing: write the table of finished runs"
    )
