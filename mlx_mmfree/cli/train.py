"""`mmfree train`: trains a language model from text files."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ..platform.allocator import keep_freed_memory
from ..training.settings import Settings
from .console import CommandParser, command
from .flags import descriptions
from .process_group import one_voice

HELP = "train a language model from text files"

_FLAGS = {
    "output": str,
    "steps": int,
    "batch_size": int,
    "accumulation_steps": int,
    "sequence_length": int,
    "learning_rate": float,
    "warmup_steps": int,
    "quantization_warmup": int,
    "weight_decay": float,
    "clip_norm": float,
    "steps_per_report": int,
    "steps_per_eval": int,
    "save_every": int,
    "seed": int,
}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, type=Path, help="YAML file with the settings")
    described = descriptions(Settings)
    for name, kind in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, help=f"{described[name]} Wins over the file.")
    parser.add_argument(
        "--linear-class",
        choices=("ternary", "dense"),
        help="The linears of the architecture. Wins over the file.",
    )
    parser.add_argument(
        "--grad-checkpoint",
        action="store_true",
        default=None,
        help=described["grad_checkpoint"],
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    from ..training import read_settings, train_language_model
    from ..training.data_parallel import DataParallel

    keep_freed_memory()
    names = {field.name for field in fields(Settings)}
    overrides = {name: value for name, value in vars(arguments).items() if name in names}
    settings = read_settings(arguments.config, overrides)
    if arguments.linear_class:
        settings.model["linear_class"] = arguments.linear_class
    processes = DataParallel()
    with one_voice(processes.rank):
        result = train_language_model(settings, processes)
        print(
            f"Best step {result['best_step']} of {result['step']}, {result['tokens']} tokens seen."
        )
        for name, value in result.get("held_out", {}).items():
            print(f"{name}: {value:.4f}")
    return 0
