"""A command: it counts the tokens of a text."""

import argparse
from collections.abc import Sequence

from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.parser import CommandParser

HELP = "count the tokens of a text"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree count", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer")
    parser.add_argument("text")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from mlx_mmfree.hub import load_tokenizer

    print(len(load_tokenizer(args.model).encode(args.text)))
    return 0
