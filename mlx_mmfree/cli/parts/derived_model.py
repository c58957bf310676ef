"""Shared by the commands that make a model of another one: `distil`, `ternarize` and `calibrate`."""

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol, TypeVar

from ...errors import TrainingError
from ...platform.allocator import keep_freed_memory
from ...training.distil.settings import DerivedModelSettings, read_settings
from ...training.precision import precision_note
from .flags import add_plugin_flag, add_settings_flags
from .loading import add_dry_run_flag


class _Run(Protocol):
    def check_files(self) -> None: ...


Kind = TypeVar("Kind", bound=DerivedModelSettings)
Run = TypeVar("Run", bound=_Run)


def add_run_flags(
    parser: argparse.ArgumentParser,
    settings: type[DerivedModelSettings],
    without: Collection[str] = (),
) -> None:
    """Adds the flags of a run; `without` are names of settings that get none."""
    parser.add_argument(
        "-c", "--config", type=Path, help="YAML file with the settings, whose keys are the flags"
    )
    add_settings_flags(parser, settings, without)
    add_plugin_flag(parser)
    add_dry_run_flag(parser)


def settings_of(args: argparse.Namespace, kind: type[Kind]) -> Kind:
    """The settings from the YAML file and the flags.

    Raises:
        TrainingError: As for `read_settings`.
    """
    names = {kind.key(field.name) for field in kind.declared()}
    given = {name: value for name, value in vars(args).items() if name in names}
    return read_settings(args.config, given, kind)


def prepared(run: Callable[..., Run], settings: DerivedModelSettings, *, only_plans: bool) -> Run:
    """A run with its model open, whose texts are there.

    Args:
        run: Makes it of its settings.
        settings: The settings.
        only_plans: Whether it is planned alone. Missing texts are then only reported, since the plan
            follows from shapes.

    Raises:
        TrainingError: A setting or a file is wrong.
    """
    keep_freed_memory()
    if note := precision_note(settings.dtype):
        print(note)
    made = run(settings, only_plans=only_plans)
    try:
        made.check_files()
    except TrainingError as error:
        if not only_plans:
            raise
        print(f"note: {error}", file=sys.stderr)
    return made
