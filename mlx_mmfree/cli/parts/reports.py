"""The flags of the training commands that send the log to another service as well."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from ...training.callbacks import Callback
    from ...training.data_parallel import DataParallel


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report-to", help="service that the log is also sent to: wandb (Weights & Biases)"
    )
    parser.add_argument("--project-name", help="name of the project at that service")


def check_report_flags(args: argparse.Namespace, command: str) -> None:
    """Refuses an unknown service, in the name of a command.

    Raises:
        UsageError: The service is not wandb.
    """
    if args.report_to not in (None, "wandb"):
        raise UsageError(f"[{command}] 'report_to' must be wandb but got {args.report_to!r}.")


def report_callbacks(
    args: argparse.Namespace, folder: Path, record: Mapping[str, Any], processes: "DataParallel"
) -> "list[Callback]":
    """The callbacks that the flags ask for. Only the first process has any."""
    from ...training.callbacks import WandbReport

    if args.report_to != "wandb" or not processes.is_first:
        return []
    return [WandbReport(args.project_name, folder, record)]
