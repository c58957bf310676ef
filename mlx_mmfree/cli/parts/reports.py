"""The flags of the training commands that send the log to other services as well."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from ...training.data_parallel import DataParallel
    from ...training.results import Callback

_SERVICES = ("wandb", "tensorboard")


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report-to",
        help="where the log also goes: wandb (Weights & Biases), tensorboard, or both with a comma",
    )
    parser.add_argument("--project-name", help="name of the project at Weights & Biases")


def check_report_flags(args: argparse.Namespace, command: str) -> None:
    """Refuses an unknown service, in the name of a command.

    Raises:
        UsageError: The service is unknown.
    """
    for name in _chosen(args):
        if name not in _SERVICES:
            raise UsageError(
                f"[{command}] 'report_to' must be {' or '.join(_SERVICES)} but got {name!r:.80}."
            )


def report_callbacks(
    args: argparse.Namespace, folder: Path, record: Mapping[str, Any], processes: "DataParallel"
) -> "list[Callback]":
    """The callbacks that the flags ask for. Only the first process has any."""
    from ...training.services import TensorBoardReport, WandbReport

    chosen = _chosen(args) if processes.is_first else []
    callbacks: list[Callback] = []
    if "wandb" in chosen:
        callbacks.append(WandbReport(args.project_name, folder, record))
    if "tensorboard" in chosen:
        callbacks.append(TensorBoardReport(folder, record))
    return callbacks


def _chosen(args: argparse.Namespace) -> list[str]:
    """The services that the flag or the file names."""
    given = args.report_to
    if given is None:
        return []
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else [given]
