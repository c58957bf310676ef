"""`mmfree calibrate`: makes a dense model ternary window by window, in the memory of a few layers."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..training.calibrate.settings import CalibrateSettings
from .parts import loading, source_card, terminal
from .parts.command import command
from .parts.derived_model import add_run_flags, prepared, settings_of
from .parts.parser import CommandParser

if TYPE_CHECKING:
    from ..training.calibrate.plan import CalibrationPlan

HELP = "make a dense model ternary window by window, in the memory of a few layers"

_NIGHT_S = 8 * 3600
_OTHERS = {"steps_per_report", "steps_per_eval", "save_every"}
"""Settings of runs that say nothing where a window is a unit."""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree calibrate",
        usual="--config --model --output --data --valid --samples --length --epochs --window --rank "
        "--dry-run",
        description=f"{__doc__} Each window learns to give what the same dense layers give. The result "
        "has the same architecture, and its matrices have 2 bits a weight, so that mlx-lm opens it, and "
        "llama.cpp after `mmfree convert --to gguf`. A flag wins over the YAML file.",
        epilog="Repeat the command to go on after a stop, which loses one window at most. `mmfree "
        "ternarize` trains the whole model, in many times the memory, and may go on from the result.",
    )
    add_run_flags(parser, CalibrateSettings, _OTHERS)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    _run(arguments, settings_of(args, CalibrateSettings), dry_run=args.dry_run)
    return 0


def _run(arguments: Sequence[str], settings: CalibrateSettings, *, dry_run: bool) -> None:
    from ..training.calibrate.calibration import Calibration

    calibration = prepared(Calibration, settings, only_plans=dry_run)
    print(*plan_shown(calibration.plan), sep="\n")
    if warning := calibration.plan.memory.warning():
        print("warning:", warning, file=sys.stderr)
    if dry_run:
        print(*times_shown(calibration.plan, settings.epochs), sep="\n")
        return
    card = source_card.model_card("calibrate", arguments, settings.model, None, calibration.folder)
    metrics = calibration.run(card)["metrics"]
    dense, ternary = metrics["dense_loss"], metrics["ternary_loss"]
    print(
        f"Held-out samples: {dense:.4f} nats a token before, {ternary:.4f} after, "
        f"{100 * (ternary / dense - 1):.1f} % above.\nWrote the model to "
        f"'{Path(settings.output) / 'model'}'."
    )


def plan_shown(plan: "CalibrationPlan") -> list[str]:
    """The lines on memory and disk."""
    lines = [str(plan.memory)]
    if plan.rest_bytes > plan.memory.total:
        lines.append(
            f"To run dense layers, an embedding or a head takes more: "
            f"{terminal.size_text(plan.rest_bytes)}."
        )
    lines.append(
        f"The files of the run take up to {terminal.size_text(plan.disk_bytes)} of the disk."
    )
    return lines


def times_shown(plan: "CalibrationPlan", epochs: int) -> list[str]:
    """The lines on the time of a run."""
    from ..training.distil.student import MACHINES, apple

    machines = {"M1": apple("M1"), **MACHINES}
    head = ("", "operations", *(f"hours, {name}" for name in machines))
    rows: list[Sequence[str]] = [head]
    for words, effort in ((f"{epochs} epochs", plan.effort), ("1 epoch", plan.epoch)):
        hours = (loading.hours_text(effort.total / m.rate / 3600) for m in machines.values())
        rows.append((words, f"{effort.total:.2e}", *hours))
    nights = ", ".join(
        f"{name} {_NIGHT_S * machine.rate / plan.epoch.total:,.2g}"
        for name, machine in machines.items()
        if name.startswith("M")
    )
    return [
        *terminal.aligned(rows),
        f"Epochs in a night of 8 hours: {nights}.",
        "Computed, not measured: a GPU is taken to reach 30 % of its bound, as in `mmfree bench "
        "--bound`.",
    ]
