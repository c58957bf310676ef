"""Where the training commands also send their records."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from ...training.callbacks import Callback
    from ...training.data_parallel import DataParallel


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report-to", help="also send the records to: wandb")
    parser.add_argument("--project-name", help="project of the reports")


def check_report_flags(args: argparse.Namespace, command: str) -> None:
    """Refuses, in the name of a command, a receiver that is not known.

    Raises:
        UsageError: It is not wandb.
    """
    if args.report_to not in (None, "wandb"):
        raise UsageError(f"[{command}] 'report_to' must be wandb but got {args.report_to!r}.")


def reports(
    args: argparse.Namespace, folder: Path, record: Mapping[str, Any], processes: "DataParallel"
) -> "list[Callback]":
    """The callbacks that the flags ask for, in the first process."""
    from ...training.callbacks import WandbReport

    if args.report_to != "wandb" or not processes.is_first:
        return []
    return [WandbReport(args.project_name, folder, record)]
