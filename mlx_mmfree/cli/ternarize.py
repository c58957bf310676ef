"""`mmfree ternarize`: makes a dense model ternary, which learns its weights anew from itself."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ..training.distil.settings import TernarizeSettings, read_settings
from . import distil
from .parts.command import command
from .parts.flags import add_plugin_flag, add_settings_flags
from .parts.loading import add_dry_run_flag
from .parts.parser import CommandParser

HELP = "make a dense model ternary, by training with itself as the teacher"

_OTHERS = {"mixers_steps", "mixers_rate", "hidden_steps", "hidden_rate", "random_mixers"}
"""Settings of `mmfree distil` that say nothing where attention stays."""


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
    parser.add_argument(
        "-c", "--config", type=Path, help="YAML file with the settings, whose keys are the flags"
    )
    parser.add_argument("--model", help="folder or Hub repository of the dense model")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder of the run and of the ternary model",
    )
    parser.add_argument("--data", nargs="+", help="text or token files to learn from")
    parser.add_argument("--valid", nargs="+", help="held-out text or token files")
    add_settings_flags(parser, TernarizeSettings, _OTHERS)
    add_plugin_flag(parser)
    add_dry_run_flag(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    names = {TernarizeSettings.key(field.name) for field in fields(TernarizeSettings)}
    given = {name: value for name, value in vars(args).items() if name in names}
    settings = read_settings(args.config, given, TernarizeSettings)
    distil.run("ternarize", arguments, settings, dry_run=args.dry_run)
    return 0
