"""`mmfree distil`: turns a transformer into a model with other token mixers, which learns from it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..training.distil.settings import MEASURED, DistilSettings
from .parts import derived_model, flags, loading, source_card, terminal
from .parts.command import command
from .parts.parser import CommandParser

if TYPE_CHECKING:
    from ..training.distil.distil import Distillation


HELP = "turn a transformer into a model without attention"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree distil",
        usual="--config --model --output --to --ternary --keep-layers --data --valid --seed --dry-run",
        description=f"{__doc__} A flag wins over the YAML file.",
        epilog="Repeat the command to resume a run that was stopped.",
    )
    derived_model.add_run_flags(parser, DistilSettings)
    parser.add_argument(
        "--to",
        nargs="+",
        type=_mixer,
        metavar="MIXER",
        help="token mixers in place of attention, such as mlgru, which repeat from layer to layer; "
        "`same` keeps attention; options stand in a JSON object beside 'name'",
    )
    parser.add_argument(
        "--keep-layers",
        type=_layers,
        metavar="LIST",
        help="layers that keep their attention, from 0, such as 0,4-6",
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    settings = derived_model.settings_of(args, DistilSettings)
    if settings.ternary and settings.to == ("same",):
        name = f"mmfree ternarize --scales {settings.scales}"
        print(f"note: `{name}` is made for this, with other defaults.", file=sys.stderr)
    run("distil", arguments, settings, dry_run=args.dry_run)
    return 0


def run(
    name: str, arguments: Sequence[str], settings: DistilSettings, *, dry_run: bool = False
) -> None:
    """Plans a distillation, runs it unless it is a dry run, and prints the result.

    Args:
        name: The command, and `arguments` its own, for the model card.
        arguments: The command's arguments.
        settings: The run.
        dry_run: Whether it is planned alone.
    """
    from ..training.distil.distil import Distillation
    from ..training.reports import StepReports
    from ..training.results import written_models

    distillation = derived_model.prepared(Distillation, settings, only_plans=dry_run)
    plans = distillation.plans()
    stage, plan = max(plans.items(), key=lambda item: item[1].total)
    if len(plans) > 1:
        print(f"The stage '{stage}' takes the most memory.")
    loading.show_plan(plan)
    if dry_run:
        print(*efforts_shown(distillation), sep="\n")
        return
    card = source_card.model_card(name, arguments, settings.model, None, distillation.folder)
    report = distillation.run([StepReports()], card=card)
    rows = [("", *next(iter(report["metrics"].values())))]
    for name, metrics in report["metrics"].items():
        rows.append((MEASURED[name], *(f"{value:.4f}" for value in metrics.values())))
    if len(rows[0]) > 1:
        print(*terminal.aligned(rows, left=1), sep="\n")
    print(written_models(Path(settings.output)))


def _layers(text: str) -> list[int]:
    return sorted(flags.number_list(text))


def _mixer(text: str) -> str | dict[str, Any]:
    """The name of a mixer, or a JSON object with options."""
    return flags.json_object(text) if text.lstrip().startswith("{") else text


def efforts_shown(distillation: "Distillation") -> list[str]:
    """The lines that a dry run prints: a row for each stage, one for all, and where rates come from."""
    import mlx.core as mx

    from ..training.distil.student import MACHINES

    asked: mx.Dtype = getattr(mx, distillation.settings.dtype)
    memory: dict[str, int] = {name: plan.total for name, plan in distillation.plans(asked).items()}
    stages = {name: [effort] for name, effort in distillation.efforts().items()}
    every = [effort for efforts in stages.values() for effort in efforts]
    head = ("stage", "tokens", "operations", "GPU memory", *(f"hours, {name}" for name in MACHINES))
    rows: list[Sequence[str]] = [head]
    for name, efforts in (*(stages.items() if len(stages) > 1 else ()), ("all", every)):
        tokens, operations = (sum(getattr(e, key) for e in efforts) for key in ("tokens", "total"))
        most = memory.get(name, max(memory.values()))
        hours = (loading.hours_text(sum(e.hours(machine) for e in efforts)) for machine in MACHINES)
        rows.append((name, f"{tokens:,}", f"{operations:.2e}", terminal.size_text(most), *hours))
    lines = terminal.aligned(rows)
    if logits := distillation.settings.logits_bytes:
        lines.append(f"The teacher's logits take {terminal.size_text(logits)} of the disk.")
    lines.append(
        "Estimates. A GPU is taken to reach 30 % of its bound, as in `mmfree bench --bound`."
    )
    rates = (f"{name}: {m.rate / 1e12:.3g} TFLOP/s ({m.source})." for name, m in MACHINES.items())
    return [*lines, *rates]
