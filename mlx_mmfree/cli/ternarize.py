"""`mmfree ternarize`: makes a dense model ternary, which learns its weights anew from itself."""

import argparse
import sys
from collections.abc import Sequence

from ..training.distil.settings import TernarizeSettings
from . import distil
from .parts.command import command
from .parts.derived_model import add_run_flags, settings_of
from .parts.parser import CommandParser

HELP = "make a dense model ternary, by training with itself as the teacher"

_OTHERS = {"mixers_steps", "mixers_rate", "hidden_steps", "hidden_rate", "random_mixers", "ternary"}
"""Settings of `mmfree distil` that say nothing where attention stays and linears become ternary."""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree ternarize",
        usual="--config --model --output --data --valid --scales --steps --learning-rate --seed "
        "--dry-run",
        description=f"{__doc__} The result has the same architecture and no more tensors, and its "
        "matrices have 2 bits a weight, so that mlx-lm opens it, and llama.cpp after `mmfree convert "
        "--to gguf`. A flag wins over the YAML file.",
        epilog="Repeat the command to resume a run that was stopped. `mmfree convert --ternarize` "
        "rounds the weights without any training, and `mmfree calibrate` takes the memory of a few "
        "layers.",
    )
    add_run_flags(parser, TernarizeSettings, _OTHERS)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    settings = settings_of(args, TernarizeSettings)
    distil.run("ternarize", arguments, settings, dry_run=args.dry_run)
    return 0
