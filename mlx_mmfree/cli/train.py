"""`mmfree train`: trains a model from texts, token files, pairs of texts, labelled texts or images."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..platform.allocator import keep_freed_memory
from ..platform.terminal import counted
from ..training.precision import precision_note
from ..training.run_settings import seen_from_file
from ..training.services import chosen_services, service_callbacks
from ..training.settings import Settings, read_settings
from .parts import loading
from .parts.command import command
from .parts.flags import add_plugin_flag, add_report_flags, add_settings_flags
from .parts.parser import CommandParser
from .parts.process_group import add_process_flags, connected, quiet_unless_first

HELP = "train a model on texts or images"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree train",
        usual="--output --init-from --steps --batch-size --learning-rate --optimizer --seed --dry-run",
        description=f"{__doc__} A flag wins over the YAML file.",
        epilog="Repeat the command to resume a run that was stopped. A finished run goes on if it is "
        "given more --steps.",
    )
    parser.add_argument(
        "-c", "--config", required=True, type=Path, help="YAML file with the settings"
    )
    add_settings_flags(parser, Settings)
    parser.add_argument(
        "--linear-class",
        choices=("ternary", "dense"),
        help="kind of the architecture's linear layers, whatever the file says",
    )
    loading.add_latent_flag(parser)
    add_plugin_flag(parser)
    add_report_flags(parser)
    add_process_flags(parser)
    loading.add_dry_run_flag(parser)
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    services = chosen_services(args.report_to, "train")
    settings = _settings(args)
    from ..training.data_parallel import DataParallel
    from ..training.first_model import FirstModel
    from ..training.loop import plan_training, train_model
    from ..training.reports import StepReports
    from ..training.results import Callback, written_models

    keep_freed_memory()
    output = settings.path(settings.output)
    # before work that may take one process longer than MLX waits for it
    group = connected(args, "train")
    first = FirstModel(settings)
    first.task.check_files(settings)
    processes = DataParallel(group, timeout_s=settings.process_timeout_s)
    with quiet_unless_first(processes.rank), loading.limited_memory(args, first.nbytes):
        if note := precision_note(settings.dtype):
            print(note)
        teacher = None if first.teacher is None else first.teacher.without_values()
        plan = plan_training(settings, first.model, processes, teacher=teacher)
        if not args.dry_run:
            plan.check(args.memory_limit, settings.model)
        loading.show_plan(plan)
        if args.dry_run:
            return 0
        callbacks: list[Callback] = [StepReports(settings.steps, first.task.unit)]
        callbacks += service_callbacks(
            services, args.project_name, output, settings.record(), processes
        )
        result = train_model(settings, processes, callbacks=callbacks, first=first)
        best = f"best step {result['best_step']}, " if settings.valid else ""
        print(
            f"{counted(result['step'], 'step')}, {best}learned from {result['tokens']:,} "
            f"{first.task.unit}."
        )
        for name, value in result.get("held_out", {}).items():
            print(f"{name}: {value:.4f}")
        print(written_models(output))
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    """The settings from the YAML file and the flags."""
    overrides: dict[str, Any] = {}
    for each in Settings.declared():
        value = getattr(args, each.name, None)
        if value is not None and each.metadata["holds"]:
            value = seen_from_file(each, value, args.config)
        overrides[each.name] = value
    return read_settings(args.config, overrides, linear_class=args.linear_class)
