"""`mmfree show`: draws how a model mixes a text or what its weights are, or prints its parts."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from .parts import show_attention, show_model, show_weights
from .parts.command import CommandParser, command

HELP = "draw how a model mixes a text, draw its ternary weights, or print its parts"

_KINDS: dict[str, tuple[Any, str]] = {
    "attention": (show_attention, "the weights by which layers and heads mix a text, as a picture"),
    "weights": (show_weights, "shares and scales of ternary weights, as a table and a picture"),
    "model": (show_model, "the tree of parts with shapes, parameters, bits and bytes"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree show", description=__doc__)
    kinds = parser.add_subparsers(
        title="what is shown", metavar=", ".join(_KINDS), parser_class=CommandParser
    )
    for name, (module, what) in _KINDS.items():
        kind = module.build_parser()
        kinds.add_parser(
            name,
            prog=kind.prog,
            description=kind.description,
            help=what,
            parents=[kind],
            add_help=False,
        )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _KINDS:
        status: int = _KINDS[arguments[0]][0].main(arguments[1:])
        return status
    parser = build_parser()
    if arguments:
        parser.parse_args(arguments)
    raise UsageError(
        f"[show] what is shown must be one of {', '.join(_KINDS)} but none is named. See 'mmfree show "
        "--help'."
    )
